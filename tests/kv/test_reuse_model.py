"""What the adaptive policy learns: trees, waiting times, the Gittins index, and conversations that come back."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np
import pytest

from pagetrie.kv import CacheManager, RequestKind
from pagetrie.kv.eviction import make_policy
from pagetrie.kv.eviction.adaptive import GHOST_PAGES, Adaptive, Ghost
from pagetrie.kv.eviction.boosting import fit
from pagetrie.kv.eviction.reuse_model import (
    _AGES,
    _LEVELS,
    HORIZON,
    OFTENEST,
    RAREST,
    WINDOW,
    ReuseModel,
    Turn,
    _gittins,
    waiting_times,
)
from pagetrie.replay.index_only import replay_index
from pagetrie.replay.trace import Trace, TraceRequest

PAGE = 16


def test_trees_learn_what_two_features_say_together() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(2000, 3))
    labels = ((features[:, 0] > 0) ^ (features[:, 1] > 0.5)).astype(float)
    model = fit(features, labels, np.ones(2000), trees=30)
    test = rng.normal(size=(500, 3))
    truth = (test[:, 0] > 0) ^ (test[:, 1] > 0.5)
    odds = model.log_odds_of(test)
    assert ((odds > 0) == truth).mean() > 0.9
    assert odds == pytest.approx([model.log_odds(row) for row in test.tolist()])
    assert model.probability(test[0].tolist()) == pytest.approx(1 / (1 + math.exp(-odds[0])))


def test_weights_count_like_copies() -> None:
    rng = np.random.default_rng(1)
    features = rng.integers(0, 4, size=(300, 2)).astype(float)
    labels = (rng.random(300) < features[:, 0] / 4).astype(float)
    weights = rng.integers(1, 4, size=300).astype(float)
    copies = np.repeat(np.arange(300), weights.astype(int))
    # Few distinct values, so that both see the same quantiles.
    once = fit(features, labels, weights, bins=64).log_odds_of(features)
    repeated = fit(features[copies], labels[copies], np.ones(len(copies)), bins=64).log_odds_of(features)
    assert once == pytest.approx(repeated, abs=0.05)


def test_features_that_never_differ_are_no_trouble() -> None:
    model = fit(np.zeros((50, 2)), np.ones(50), np.ones(50))
    assert model.probability([0.0, 0.0]) > 0.9


def test_waiting_times_without_censoring_are_the_empirical_shares() -> None:
    waits = np.random.default_rng(2).uniform(1, 500, size=4000)
    shares = waiting_times(waits, np.ones(4000, bool))
    for age, share in zip(_AGES, shares, strict=True):
        assert share == pytest.approx((waits < age).mean(), abs=1e-6)


def test_waiting_times_see_through_turns_that_were_not_watched_to_the_end() -> None:
    rng = np.random.default_rng(3)
    waits, watched = rng.exponential(100, 20_000), rng.uniform(0, 600, 20_000)
    shares = waiting_times(np.minimum(waits, watched), waits <= watched)
    early = _AGES < 400
    assert shares[early] == pytest.approx(1 - np.exp(-_AGES[early] / 100), abs=0.03)


def test_the_index_is_the_best_rate_over_all_times_to_hold() -> None:
    waits = np.interp(_AGES, [0, 30, 60, 90, HORIZON], [0, 0.02, 0.5, 0.9, 1.0])
    table = _gittins(waits)
    for level in (0, 20, _LEVELS - 1):
        chance = (level + 0.5) / _LEVELS
        for start in range(0, len(_AGES) - 1, 7):
            best, held = 0.0, 0.0
            for end in range(start + 1, len(_AGES)):
                still = 1 - chance * (waits[end] + waits[end - 1]) / 2
                held += still * (_AGES[end] - _AGES[end - 1])
                best = max(best, chance * (waits[end] - waits[start]) / held)
            assert table[level][start] == pytest.approx(best)


def test_the_model_tells_who_comes_back() -> None:
    """Short prompts are continued after a minute, long ones never."""
    model, now = ReuseModel(), 0.0
    for number in range(600):
        now += 1.0
        turn = Turn(now, 100 if number % 2 else 5000, 0, 50, None)
        model.observe(turn)
        if number % 2:
            turn.continued = now + 60
    short, long = Turn(now, 100, 0, 50, None), Turn(now, 5000, 0, 50, None)
    model.observe(short)
    model.observe(long)
    assert short.level > 0.8 * _LEVELS and long.level < 0.2 * _LEVELS
    assert model.worth(short, now) > 10 * model.worth(long, now)
    # Once the minute is over, hardly anything is to be hoped for.
    assert model.worth(short, now + 50) > model.worth(short, now) > 10 * model.worth(short, now + 120)
    assert model.worth(short, now + HORIZON) == 0


def test_fits_are_far_between() -> None:
    model, fits = ReuseModel(), []
    for number in range(1, 10_000):
        turn = Turn(float(number), number % 700, 0, number % 90, None)
        turn.continued = number + 5.0
        if model.observe(turn):
            fits.append(number)
    gaps = np.diff(fits)
    assert fits[0] == OFTENEST and gaps.min() >= OFTENEST and gaps.max() == RAREST
    assert len(model._turns) == WINDOW


class Chat:
    """Serves prompts on a manager of its own, at given times."""

    def __init__(self, index: str, num_pages: int, eviction: str = "adaptive") -> None:
        self.now = 0.0
        self.policy = make_policy(eviction, num_pages, PAGE, lambda: self.now)
        self.manager = CacheManager(num_pages=num_pages, page_size=PAGE, index=index, policy=self.policy)

    def say(self, prompt: list[int]) -> int:
        lease = self.manager.open(prompt)
        assert lease.extend(len(prompt) - lease.computed) == 0
        lease.commit(len(prompt) - lease.computed)
        self.manager.take_copies()
        lease.close()
        return lease.cached_tokens

    def last_turn(self) -> Turn:
        assert isinstance(self.policy, Adaptive)
        return self.policy._model._turns[-1]


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_a_conversation_is_recognised_after_its_eviction_too(index: str) -> None:
    chat = Chat(index, 12)
    talk = list(range(100, 100 + 5 * PAGE))
    chat.say(talk)
    first = chat.last_turn()
    assert first.number == 0 and first.continued == math.inf
    chat.now = 10.0
    for number in range(3):
        chat.say([1000 + number] * (10 * PAGE))
    assert chat.last_turn().number == 0
    chat.now = 42.0
    cached = chat.say([*talk, *range(40)])
    assert cached < 5 * PAGE, "it wasn't evicted, so this shows nothing"
    assert chat.last_turn().number == 1
    assert first.continued == 42.0
    # A request that merely shares its beginning continues nothing.
    chat.say([*talk[: 2 * PAGE], *range(500, 500 + 3 * PAGE)])
    assert chat.last_turn().number == 0


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_ghosts_are_bounded(index: str) -> None:
    chat = Chat(index, 16)
    assert isinstance(chat.policy, Adaptive)
    for number in range(600):
        chat.now += 1.0
        chat.say([number] * (3 * PAGE + 5))
    ghosts = [entry[3] for entry in chat.policy._ghosts]
    assert 0 < sum(ghost.pages for ghost in ghosts) == chat.policy._ghost_pages <= GHOST_PAGES * 16

    def count(below: dict[bytes, Ghost]) -> int:
        return sum(1 + count(ghost.below) for ghost in below.values())

    # Where they are looked up there are no more of them; some have gone with the node they hung below.
    marks = [root.mark for root in chat.manager.index._roots.values()]
    marks += [node.mark for node in chat.manager.index.nodes()]
    assert sum(count(mark.ghosts) for mark in marks if mark) <= len(ghosts)
    chat.now += 2 * HORIZON
    chat.say([7, 7, 7])
    assert all(entry[0] == chat.now for entry in chat.policy._ghosts)


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_it_learns_to_keep_conversations_and_drop_documents(index: str) -> None:
    """Chats come back after a minute; documents, twice as many pages, never do. LRU keeps neither long enough."""

    def hits(eviction: str) -> int:
        chat, found = Chat(index, 48, eviction), 0
        talks: list[list[int]] = []
        for step in range(700):
            chat.now = step * 3.0
            chat.say([5000 + step] * (6 * PAGE))
            talks.append([100_000 + step] * (2 * PAGE))
            chat.now += 1.0
            chat.say(talks[step])
            if step >= 20:
                chat.now += 1.0
                cached = chat.say([*talks[step - 20], *range(20)])
                found += cached >= 2 * PAGE if step >= 350 else 0
        return found

    assert hits("lru") == 0
    assert hits("adaptive") > 175, "half of those in the second half"


def test_the_kind_of_request_tells_what_lengths_do_not() -> None:
    """Agents' calls and documents look alike; nine calls in ten go on once, no document is read again."""
    rng, waiting, trace = random.Random(0), list[tuple[float, list[int]]](), Trace("kinds", PAGE)
    for number in range(2500):
        now = float(number)
        if waiting and waiting[0][0] <= now:
            pages, kind = [*heappop(waiting)[1], 10 * number], RequestKind.TOOL
        else:
            pages = list(range(10 * number, 10 * number + 4))
            kind = rng.choice((RequestKind.CHAT, RequestKind.COMPLETION))
            if kind is RequestKind.CHAT and rng.random() < 0.9:
                heappush(waiting, (now + rng.uniform(10, 150), pages))
        trace.requests.append(TraceRequest(now, PAGE * len(pages), 8, pages, kind=kind))
    unknown = Trace("unknown", PAGE, [replace(one, kind=RequestKind.UNKNOWN) for one in trace.requests])
    blind, told = (replay_index(one, 120, "adaptive")[0].rate for one in (unknown, trace))
    assert told > 1.2 * blind, (told, blind)
