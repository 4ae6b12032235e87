"""A world as data, drawn from a seed: what the server is like, who asks what when, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pagetrie.kv.eviction import POLICIES
from tests.simulation.vocabulary import AwkwardVocabulary

Phase = Literal["any", "waiting", "awaiting", "prefill", "decode", "preempted"]
PHASES: tuple[Phase, ...] = ("any", "waiting", "awaiting", "prefill", "decode", "preempted")

_NOT_TO_APPEND = ("n", "stop", "beam_width", "length_penalty", "early_stopping")
_USES: tuple[Literal["plain", "fork", "append"], ...] = ("plain", "fork", "append")

_ORDINARY = range(2, AwkwardVocabulary.vocab_size)
_STOPS = ("ab", "abc", "cab", "aba", "bb", " a", "\n", "é", "€", "\ufffd", "xyz", "a b", "ba b")


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request to come.

    Attributes:
        arrival: the step before which it arrives; for a follower, steps after the end of what it follows.
        timeout: seconds; None for none.
        follows: a chat's previous turn: that request's prompt and answer come before this prompt.
        context: start from this context of the world.
        use: what to do with it: ``plain``, ``fork`` it and use the fork, or ``append`` prompt and answer to it.
        params: for ``SamplingParams``.
        cancel: leave when this has been seen so many times: (phase, times); None stays to the end.
    """

    name: str
    arrival: int
    prompt: tuple[int, ...]
    params: Mapping[str, object]
    salt: str = ""
    priority: int = 0
    timeout: float | None = None
    follows: str | None = None
    context: str | None = None
    use: Literal["plain", "fork", "append"] = "plain"
    cancel: tuple[Phase, int] | None = None


@dataclass(frozen=True, slots=True)
class ContextSpec:
    """A prefix that is kept. Made at step ``arrival``, deleted at step ``end`` if it hasn't expired by then."""

    name: str
    arrival: int
    end: int
    ids: tuple[int, ...]
    salt: str
    ttl: float


@dataclass(frozen=True, slots=True)
class TierSpec:
    """What stands below the pool. Rates are probabilities: of a fault per call and step, of a stall per stop, and of an
    eviction of all that nobody uses per step.

    Attributes:
        ram_pages, store_pages: how many pages memory and store take; 0 for no such tier.
        disk_bytes: what the disk tier may take; 0 for none.
        queue_pages: pages that may wait to be written, per tier.
        meets: prompts' first pages are computed while the last ones are loaded.
    """

    ram_pages: int
    disk_bytes: int
    store_pages: int
    queue_pages: int
    sealed: bool
    fault_rate: float
    stall_rate: float
    evict_rate: float
    meets: bool


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """A server and its day. Rates are probabilities per step."""

    seed: int
    num_pages: int
    page_size: int
    index: Literal["radix", "hash", "none", "contiguous"]
    max_model_len: int
    seats: int
    budget: int
    max_queue: int
    ageing_steps: int
    max_bypass: int
    hold_limit: int
    eviction: str
    failure_rate: float
    reset_rate: float
    slow_rate: float
    tiers: TierSpec | None
    requests: tuple[RequestSpec, ...] = field(repr=False, default=())
    contexts: tuple[ContextSpec, ...] = ()


def draw_world(seed: int) -> WorldSpec:
    """The world of a seed."""
    rng = random.Random(seed)
    page_size = rng.choice((1, 2, 3, 4, 4, 8, 16))
    max_model_len = min(rng.choice((20, 40, 80, 80, 160)), 50 * page_size)
    whole = -(-max_model_len // page_size)
    # At most as many as make every step's recount cheap; a pool of one page per token is as good a world as any.
    num_pages = min(max(1, round(whole * rng.choice((0.4, 1, 1.2, 1.5, 2, 2, 3, 3, 4, 8)))), 120)
    seats = rng.choice((1, 3, 4, 5, 8, 8, 8, 16, 16, 16))
    world = WorldSpec(
        seed=seed,
        num_pages=num_pages,
        page_size=page_size,
        index=rng.choice(("radix",) * 9 + ("hash",) * 6 + ("none",) * 2 + ("contiguous",)),
        max_model_len=min(max_model_len, num_pages * page_size),
        seats=seats,
        budget=seats + rng.choice((0, 1, 3, 8, 32, 100)),
        max_queue=rng.choice((2, 8, 1000, 1000, 1000, 1000)),
        ageing_steps=rng.choice((1, 5, 20, 100)),
        max_bypass=rng.choice((0, 1, 4, 32)),
        hold_limit=rng.choice((num_pages // 4, num_pages // 2, num_pages)),
        eviction=random.Random(f"eviction of {seed}").choice(("lru", *sorted(POLICIES))),
        failure_rate=rng.choice((0, 0, 0, 0.01, 0.05)),
        reset_rate=rng.choice((0, 0, 0, 0.02)),
        slow_rate=rng.choice((0, 0, 0.05)),
        tiers=None,
    )
    if (tiers := _draw_tiers(world)) is not None:
        # What was stored before a reset must not come back from below.
        world = replace(world, tiers=tiers, reset_rate=random.Random(f"resets of {seed}").choice((0, 0, 0.05)))
    asker = _Asker(rng, world)
    return replace(world, contexts=asker.contexts, requests=asker.requests())


def _draw_tiers(world: WorldSpec) -> TierSpec | None:
    """A quarter of the worlds that have an index have tiers."""
    rng = random.Random(f"tiers of {world.seed}")
    if world.index not in ("radix", "hash") or rng.random() >= 1 / 4:
        return None
    kinds = rng.choice(("ram", "disk", "store", "ram disk", "ram store", "disk store", "ram disk store"))
    return TierSpec(
        ram_pages=rng.choice((3, 30, 200)) if "ram" in kinds else 0,
        disk_bytes=rng.choice((10_000, 100_000, 1_000_000)) if "disk" in kinds else 0,
        store_pages=rng.choice((10, 100, 10_000)) if "store" in kinds else 0,
        queue_pages=rng.choice((2, 30, 1000)),
        sealed=rng.random() < 0.3,
        fault_rate=rng.choice((0, 0.1, 0.4)),
        stall_rate=rng.choice((0, 0, 0.01, 0.1)),
        evict_rate=rng.choice((0, 0.1, 0.5)),
        meets=rng.random() < 0.5,
    )


class _Asker:
    """Draws the requests of a world."""

    def __init__(self, rng: random.Random, world: WorldSpec) -> None:
        self._rng = rng
        self._limit = world.max_model_len
        self._seats = world.seats
        systems = [self._tokens(rng.randrange(0, self._limit // 2 + 1)) for _ in range(rng.choice((1, 1, 2, 4)))]
        documents = [self._tokens(rng.randrange(1, self._limit // 3 + 2)) for _ in range(3)]
        self._trunks = [*systems, *(system + document for system in systems for document in documents)]
        self._salts = rng.choice((("",), ("", "tenant"), ("one", "two")))
        self._priorities = rng.choice(((0,), (0, 1), (-3, 0, 0, 5)))
        self._timeouts = rng.choice(((None,), (None,), (None,), (None, None, 0.05, 0.3, 2.0, 25.0)))
        self._pace = rng.choice((0, 0, 0, 1, 3))
        self._cancels = rng.choice((0.0, 0.1, 0.3))
        self._branches = rng.choice((0.0, 0.2, 0.6))
        self._beams = rng.choice((0.0, 0.0, 0.15, 0.4))
        self._turns = rng.choice((0.0, 0.3))
        self.contexts = self._contexts(rng.choice((0, 0, 1, 3))) if world.index != "contiguous" else ()
        self._answers = max(1, round(self._limit * rng.choice((0.2, 0.5, 0.9))))

    def _contexts(self, count: int) -> tuple[ContextSpec, ...]:
        rng = self._rng
        return tuple(
            ContextSpec(
                name=f"c{number}",
                arrival=(arrival := rng.randrange(10)),
                end=arrival + rng.randrange(1, 200),
                ids=rng.choice([trunk for trunk in self._trunks if trunk] or [(5,)]),
                salt=rng.choice(self._salts),
                ttl=rng.choice((0.2, 2.0, 1e6)),
            )
            for number in range(count)
        )

    def requests(self) -> tuple[RequestSpec, ...]:
        rng, clock, made = self._rng, 0, list[RequestSpec]()
        for number in range(rng.choice((5, 15, 30, 60, 90))):
            follows = rng.choice(made).name if made and rng.random() < self._turns else None
            if follows is None and rng.random() < 0.7:
                clock += rng.randrange(2 * self._pace + 1)
            context = rng.choice(self.contexts) if self.contexts and follows is None and rng.random() < 0.5 else None
            params = self._params()
            use: Literal["plain", "fork", "append"] = "plain" if context is None else rng.choice(_USES)
            if use == "append":  # one choice whose text ends with its tokens
                params = {name: value for name, value in params.items() if name not in _NOT_TO_APPEND}
            made.append(
                RequestSpec(
                    name=f"r{number}",
                    arrival=clock if follows is None else rng.randrange(4),
                    prompt=self._tokens(rng.randrange(1, 6)) if follows or context else self._prompt(made),
                    params=params,
                    salt=rng.choice(self._salts) if context is None else context.salt,
                    priority=rng.choice(self._priorities),
                    timeout=rng.choice(self._timeouts),
                    follows=follows,
                    context=None if context is None else context.name,
                    use=use,
                    cancel=(rng.choice(PHASES), rng.randrange(1, 6)) if rng.random() < self._cancels else None,
                )
            )
        return tuple(made)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(_ORDINARY, k=count))

    def _prompt(self, made: list[RequestSpec]) -> tuple[int, ...]:
        rng = self._rng
        kind = rng.random()
        if kind < 0.15 and made:
            return rng.choice(made).prompt
        if kind < 0.3:
            return self._tokens(rng.randrange(1, self._limit + 3))
        tail = self._tokens(rng.randrange(1, max(2, self._limit // 4)))
        trunk = rng.choice(self._trunks)
        return (trunk if rng.random() < 0.8 else trunk[: len(trunk) // 2]) + tail

    def _params(self) -> dict[str, object]:
        rng = self._rng
        limit = rng.choice((rng.randrange(1, self._answers + 1),) * 8 + (0, 1, None))
        params: dict[str, object] = {
            "max_tokens": limit,
            "temperature": rng.choice((0.0, 0.0, 0.8)),
            "seed": rng.choice((None, 7, rng.getrandbits(64))),
            "ignore_eos": rng.random() < 0.6,
            "skip_special_tokens": rng.random() < 0.8,
            "use_prefix_cache": rng.random() < 0.95,
        }
        if rng.random() < self._branches:
            params["n"] = rng.randrange(2, min(self._seats, 5) + 2)
        if rng.random() < self._beams:
            width = rng.randrange(1, min(self._seats, 4) + 2)
            params |= {
                "temperature": 0.0,
                "beam_width": width,
                "n": rng.randrange(1, width + 1),
                "length_penalty": rng.choice((0.0, 1.0, 2.0)),
                "early_stopping": rng.choice((True, False, "never")),
            }
            if rng.random() < 0.2:
                params["logprobs"] = rng.randrange(0, 4)
            return params
        if rng.random() < 0.3:
            params["stop"] = tuple(rng.sample(_STOPS, rng.randrange(1, 4)))
        if rng.random() < 0.15:
            params["stop_token_ids"] = tuple(rng.sample(_ORDINARY, 2))
        if rng.random() < 0.15:
            params["min_tokens"] = rng.randrange(0, 1 + (self._answers if limit is None else limit))  # type: ignore[operator]
        if rng.random() < 0.2:
            params["logprobs"] = rng.randrange(0, 4)
        if rng.random() < 0.05:
            params["prompt_logprobs"] = rng.randrange(0, 3)
        return params
