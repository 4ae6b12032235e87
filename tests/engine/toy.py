"""A model small enough to be its own oracle: the next token is a hash of everything the pages say came before."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count

import numpy as np
from numpy.typing import NDArray

from pagetrie.engine.config import EngineConfig
from pagetrie.engine.engine import Engine
from pagetrie.engine.observer import EngineObserver
from pagetrie.engine.output import RequestOutput
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import ContextUse, Request
from pagetrie.engine.runner import SampleSpec, SequenceResult, StepPlan, TokenLogprob
from pagetrie.engine.tenant import LOCAL, Tenant
from pagetrie.kv import CacheManager, EvictionLog
from pagetrie.kv.pool import FREE, PRIVATE
from pagetrie.kv.transfers import Transfers

POISON = -1
EOS = 0


class ToyVocabulary:
    """Ids are letters; id 0 ends the text; ids from 200 on are single bytes 0x80 up, which make broken UTF-8."""

    vocab_size = 256
    eos_ids = frozenset({EOS})
    special_ids = frozenset({EOS})

    def __init__(self, pieces: dict[int, bytes] | None = None) -> None:
        self._pieces = pieces or {}

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces.get(token_id, bytes([97 + token_id % 26]))


def toy_next(context: Sequence[int], spec: SampleSpec) -> int:
    """Next token after ``context``; with a temperature it also depends on the seed and the number of the draw."""
    text = ",".join(map(str, context))
    if not spec.params.greedy:
        text += f"|{spec.seed}|{len(spec.output_ids)}"
    token = int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little") % 200
    while token in spec.banned_ids:
        token += 1
    return token


def toy_candidates(context: Sequence[int], count: int) -> tuple[tuple[int, float], ...]:
    """Likeliest tokens after ``context`` by falling log-probability: a hash of the context decides."""
    rng = random.Random(",".join(map(str, context)))
    values = sorted(((rng.uniform(-6.0, -0.1), token) for token in rng.sample(range(40), 24)), reverse=True)
    return tuple((token, value) for value, token in values[:count])


class ToyMemory:
    """What the pages hold: token ids. As bytes for tiers (``PageBytes``)."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.pages = [[POISON] * page_size for _ in range(num_pages)]
        self.bytes_per_page = 4 * page_size

    def read_page(self, page: int) -> NDArray[np.uint8]:
        return np.array(self.pages[page], np.int32).view(np.uint8)

    def write_page(self, page: int, data: NDArray[np.uint8]) -> None:
        self.pages[page] = data.view(np.int32).tolist()


class ToyRunner:
    """Keeps page contents as token ids and computes from nothing else, so any wrong page changes the text."""

    def __init__(
        self,
        cache: CacheManager,
        next_token: Callable[[Sequence[int], SampleSpec], int] = toy_next,
        memory: ToyMemory | None = None,
    ) -> None:
        self.cache = cache
        self.memory = (memory or ToyMemory(cache.num_pages, cache.page_size)).pages
        self.next_token = next_token
        self.computed_tokens = 0
        self.steps: list[StepPlan] = []
        self.fail_on: Callable[[StepPlan], bool] = lambda plan: False

    def execute(self, plan: StepPlan) -> list[SequenceResult]:
        self.steps.append(plan)
        if self.fail_on(plan):
            raise RuntimeError("planted failure")
        for source, destination in plan.copies:
            self.memory[destination] = self.memory[source].copy()
        results = []
        for share in plan.sequences:
            for offset, token in enumerate(share.token_ids):
                page, slot = divmod(share.start + offset, self.cache.page_size)
                physical = share.pages[page]
                assert self.cache.pool.state[physical] == PRIVATE, "an indexed or free page was written"
                assert self.cache.pool.references[physical] == 1, "a shared page was written"
                self.memory[physical][slot] = token
            self.computed_tokens += len(share.token_ids)
        for share in plan.sequences:
            end = share.start + len(share.token_ids)
            slots = [divmod(position, self.cache.page_size) for position in range(end)]
            context = [self.memory[share.pages[page]][slot] for page, slot in slots]
            assert POISON not in context, "a page was read that nobody wrote"
            result = SequenceResult()
            for spec in share.samples:
                top = toy_candidates(context, spec.candidates) if spec.candidates else ()
                result.samples.append(TokenLogprob(self.next_token(context, spec), -1.0, top))
            if share.prompt_targets is not None:
                result.prompt_logprobs = [
                    TokenLogprob(target, float(-len(context[: share.start + offset + 1])))
                    for offset, target in enumerate(share.prompt_targets)
                ]
            results.append(result)
        return results


class Collected:
    """What a listener of one request saw."""

    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.stop_reasons: dict[int, object] = {}
        self.pieces: dict[int, list[str]] = {}
        self.prompt_logprobs: object = None
        self.last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        assert self.last is None or not self.last.finished, "news after the end"
        self.last = output
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None
            self.prompt_logprobs = output.prompt_logprobs
        for delta in output.choices:
            assert delta.index not in self.reasons, "a choice went on after its end"
            self.text[delta.index] = self.text.get(delta.index, "") + delta.text
            self.pieces.setdefault(delta.index, []).append(delta.text)
            self.tokens.setdefault(delta.index, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.reasons[delta.index] = delta.finish_reason
                self.stop_reasons[delta.index] = delta.stop_reason


class World:
    """An engine over the toy model, with every invariant checked and free pages poisoned after every step."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_model_len: int = 200,
        seats: int = 8,
        budget: int = 16,
        queue: int = 1000,
        ageing: int = 256,
        bypass: int = 32,
        index: str = "radix",
        vocabulary: ToyVocabulary | None = None,
        next_token: Callable[[Sequence[int], SampleSpec], int] = toy_next,
        observer: EngineObserver | None = None,
        clock: Callable[[], float] | None = None,
        hold_limit: int | None = None,
        max_contexts: int = 256,
        make_transfers: Callable[[ToyMemory], Transfers] | None = None,
    ) -> None:
        ticks, context_numbers = count(), count(1)
        clock = clock or (lambda: float(next(ticks)))
        memory = ToyMemory(num_pages, page_size)
        self.cache = CacheManager(
            num_pages=num_pages,
            page_size=page_size,
            index=index,  # type: ignore[arg-type]
            hold_limit=hold_limit,
            evictions=EvictionLog(clock),
            transfers=make_transfers(memory) if make_transfers else None,
        )
        self.runner = ToyRunner(self.cache, next_token, memory)
        self.engine = Engine(
            runner=self.runner,
            cache=self.cache,
            vocabulary=vocabulary or ToyVocabulary(),
            config=EngineConfig(
                max_model_len=max_model_len,
                max_num_seqs=seats,
                max_num_batched_tokens=budget,
                max_queue=queue,
                ageing_steps=ageing,
                max_bypass=bypass,
                max_contexts=max_contexts,
            ),
            clock=clock,
            rng=random.Random(0),
            observer=observer,
            new_context_id=lambda: f"c{next(context_numbers)}",
        )
        self.seen: dict[str, Collected] = {}

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        salt: str = "",
        priority: int = 0,
        timeout: float | None = None,
        *,
        context: ContextUse | None = None,
        tenant: Tenant = LOCAL,
        **params: object,
    ) -> None:
        params.setdefault("temperature", 0.0)
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        self.engine.add(Request(request_id, list(prompt), sampling, salt, priority, timeout, context, tenant=tenant))
        self.seen[request_id] = Collected()

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        for output in outputs:
            self.seen[output.request_id].add(output)
        self.check()
        return outputs

    def check(self) -> None:
        self.cache.check()
        for page, state in enumerate(self.cache.pool.state):
            if state == FREE:
                self.runner.memory[page] = [POISON] * self.cache.page_size

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self.check()

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still busy after {limit} steps")

    def running(self) -> list[str]:
        """Requests with a seat, by rank."""
        return [sequence.state.request.request_id for sequence in self.engine._scheduler.running]

    def idle_pages(self) -> int:
        """Pages in use by requests; 0 when nothing runs."""
        return self.cache.stats().active_pages


def expected(
    prompt: Sequence[int], max_tokens: int, *, seed: int = 0, temperature: float = 0.0, eos: bool = True
) -> list[int]:
    """The tokens that a plain run gives, without any cache."""
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    context, output = list(prompt), []
    while len(output) < max_tokens:
        token = toy_next(context, SampleSpec(params, seed, prompt, output))
        if token == EOS and eos:
            break
        context.append(token)
        output.append(token)
    return output
