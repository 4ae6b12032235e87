"""The same with a real model: many requests on a pool that holds 6, some of which leave."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pagetrie.assembly import Parts, build
from pagetrie.engine.config import EngineConfig
from pagetrie.engine.engine import Engine
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.engine.victims import MAX_PREEMPTIONS
from pagetrie.kv import CacheManager
from pagetrie.settings import Settings
from tests.budget import first

PAGE_SIZE = 16
LONGEST = 2 * PAGE_SIZE
POOL_PAGES = 6 * LONGEST // PAGE_SIZE


@dataclass(slots=True)
class Heard:
    """What one client got: per choice, (token, log-probability) pairs and text."""

    tokens: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    finished: bool = False


@pytest.fixture(scope="module")
def parts(bundled_model: Path) -> Parts:
    """q4 weights: what a token's computation gives depends on its own sequence alone, to the last bit."""
    return build(
        Settings(model=bundled_model, threads=1, weights="q4", page_size=PAGE_SIZE, num_pages=64, max_model_len=LONGEST)
    )


def engine_over(parts: Parts, num_pages: int) -> tuple[Engine, CacheManager]:
    """An engine over the model with a pool of its own. Page contents are written before they are read, so pools may
    follow each other on one storage."""
    cache = CacheManager(num_pages=num_pages, page_size=PAGE_SIZE)
    config = EngineConfig(max_model_len=LONGEST, max_num_seqs=16, max_num_batched_tokens=96)
    runner = parts.engine._runner
    vocabulary = parts.tokenizer
    return Engine(
        runner=runner,
        cache=cache,
        vocabulary=vocabulary,
        config=config,
        clock=lambda: 0.0,
        rng=random.Random(0),
    ), cache


def draw_requests(parts: Parts, rng: random.Random, count: int) -> list[Request]:
    """A third share a system prompt; greedy and sampled; some with two choices; all fit a page at first."""
    words = ("sea", "ship", "stone", "lost", "light", "fell", "home", "tell", "them", "all", "on", "and", "we", "ran")
    system = parts.tokenizer.encode("You are a helpful guide. ")
    requests = []
    for number in range(count):
        tail = parts.tokenizer.encode(" ".join(rng.choices(words, k=rng.randrange(8, 12))))
        prompt = ([*system, *tail] if number % 3 == 0 else tail)[: PAGE_SIZE - 2]
        params = SamplingParams(
            n=2 if number % 16 == 5 else 1,
            max_tokens=rng.randrange(8, 17),
            temperature=rng.choice((0.0, 0.8)),
            seed=number,
            ignore_eos=True,
            logprobs=0,
        )
        requests.append(Request(f"r{number}", prompt, params))
    return requests


def play(engine: Engine, cache: CacheManager, requests: list[Request], leave: dict[int, list[str]]) -> dict[str, Heard]:
    """Run them to the end; after step s those in ``leave[s]`` are gone."""
    heard = {request.request_id: Heard() for request in requests}
    for request in requests:
        engine.add(request)
    steps = 0
    while engine.has_work:
        for output in engine.step():
            one = heard[output.request_id]
            assert not one.finished
            for delta in output.choices:
                pairs = [(entry.token_id, entry.logprob) for entry in delta.logprobs]
                assert [token for token, _ in pairs] == delta.token_ids
                one.tokens.setdefault(delta.index, []).extend(pairs)
                one.text[delta.index] = one.text.get(delta.index, "") + delta.text
                if delta.finish_reason is not None:
                    one.reasons[delta.index] = delta.finish_reason
            one.finished = output.finished
        steps += 1
        for name in leave.get(steps, ()):
            engine.abort(name)
        cache.check()
    return heard


@pytest.mark.parametrize(("count", "leaving"), first(1, [(24, 6), (64, 12)]))
def test_requests_on_a_pool_for_6_get_their_solo_text(parts: Parts, count: int, leaving: int) -> None:
    rng = random.Random(3)
    requests = draw_requests(parts, rng, count)
    leave: dict[int, list[str]] = {}
    for request in rng.sample(requests, leaving):
        leave.setdefault(rng.randrange(1, count), []).append(request.request_id)

    engine, cache = engine_over(parts, POOL_PAGES)
    victims: dict[object, int] = {}
    preempt = engine._scheduler._preempt

    def counted(victim: object, plan: object) -> None:
        victims[victim] = victims.get(victim, 0) + 1
        preempt(victim, plan)  # type: ignore[arg-type]

    engine._scheduler._preempt = counted  # type: ignore[method-assign,assignment]
    crowded = play(engine, cache, requests, leave)
    assert cache.stats().active_pages == 0
    engine.reset_prefix_cache()
    assert cache.stats().free_pages == POOL_PAGES
    assert len(victims) >= 5, "the pool was not short enough to show anything"
    assert max(victims.values()) <= MAX_PREEMPTIONS

    roomy, roomy_cache = engine_over(parts, 64)
    survivors = [request for request in requests if crowded[request.request_id].finished]
    assert count - len(survivors) >= leaving // 3
    for request in survivors:
        roomy.reset_prefix_cache()
        alone = play(roomy, roomy_cache, [request], {})[request.request_id]
        assert crowded[request.request_id] == alone, request.request_id
