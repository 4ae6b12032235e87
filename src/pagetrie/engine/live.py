"""A live view of an engine: everything that a dashboard shows, taken between two steps and bounded in size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from pagetrie.engine.engine import Engine
from pagetrie.engine.sequence import RequestState
from pagetrie.engine.tenant import Tenant
from pagetrie.engine.timeline import Phase, Timeline, Track
from pagetrie.engine.usage import CacheUsage, TreeSize, measure_usage
from pagetrie.kv import CacheStats
from pagetrie.kv.namespace import decode_namespace
from pagetrie.kv.picture import EdgeText, Numbers, PageOwner, Picture
from pagetrie.kv.tiers.interface import TierStats

MAX_EDGES = 400
MAX_RUNNING, MAX_WAITING = 256, 64
WINDOW = 300.0
"""Seconds that percentiles and hit rates look back."""
_SHOW_ENDED = 60.0


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request in the timeline.

    Attributes:
        phases: phase and when it began, in seconds ago.
        tenant: whose request it is.
        prompt_tokens, cached_tokens, generated_tokens: as in its usage, so far.
        computed_tokens: of its first choice, cached ones included.
        preemptions, choices, pages: choices that run or wait, distinct pages that they hold.
        reason: how it ended; empty while it runs.
    """

    id: str
    phases: list[tuple[Phase, float]]
    tenant: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    max_tokens: int
    preemptions: int
    choices: int
    pages: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LiveSnapshot:
    """One moment of an engine.

    Attributes:
        picture: pages and tree.
        requests: running ones, then waiting ones, then those that ended a moment ago.
        more_waiting: waiting ones that are not among them.
        first_tokens, token_times: seconds, of the last ``WINDOW`` seconds.
        prompt_tokens, cached_by_tier: of the same time; ``pool`` is among the tiers.
        prefill_tokens, generated_tokens, preemptions, misses: counts since start.
        tiers: what stands below the pool.
        build_seconds: how long the engine's thread computed to take this.
    """

    page_size: int
    running: int
    waiting: int
    contexts: int
    stats: CacheStats
    usage: CacheUsage
    picture: Picture
    requests: list[RequestView]
    more_waiting: int
    first_tokens: list[float]
    token_times: list[float]
    prompt_tokens: int
    cached_by_tier: dict[str, int]
    prefill_tokens: int
    generated_tokens: int
    preemptions: int
    misses: dict[str, int]
    tiers: Mapping[str, TierStats]
    build_seconds: float


class LiveView:
    """Takes snapshots of one engine.

    Args:
        timeline: heard of everything that the engine did.
        cpu_clock: seconds that the calling thread has computed.
    """

    def __init__(self, timeline: Timeline, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        self.timeline = timeline
        self._cpu_clock = cpu_clock
        self._numbers = Numbers()

    def take(self, engine: Engine) -> LiveSnapshot:
        """Take a snapshot. To be called on the engine's thread, between two steps."""
        begun, now, timeline = self._cpu_clock(), engine.now(), self.timeline
        leases = [(lease, sequence.state.namespace) for sequence in engine.running for lease in sequence.leases]
        picture = engine.cache.picture(leases, owner_of, self._numbers, MAX_EDGES)
        held, tree = [lease for lease, _ in leases], TreeSize(*picture.size)
        requests, more = self._requests(engine, now)
        report = engine.transfer_report()
        admissions = [entry for entry in timeline.admissions if now - entry[0] <= WINDOW]
        return LiveSnapshot(
            page_size=engine.page_size,
            running=engine.num_running,
            waiting=engine.num_waiting,
            contexts=len(engine.contexts),
            stats=engine.cache_stats(),
            usage=measure_usage(engine.cache, held, engine.config.max_model_len, tree),
            picture=picture,
            requests=requests,
            more_waiting=more,
            first_tokens=[seconds for time, seconds in timeline.first_tokens if now - time <= WINDOW],
            token_times=[seconds for time, seconds in timeline.token_times if now - time <= WINDOW],
            prompt_tokens=sum(prompt for _, prompt, _, _ in admissions),
            cached_by_tier=_by_tier((cached, below) for _, _, cached, below in admissions),
            prefill_tokens=timeline.totals.prefill_tokens,
            generated_tokens=timeline.totals.generated_tokens,
            preemptions=timeline.totals.preemptions,
            misses=dict(timeline.totals.misses),
            tiers=report.tiers if report is not None else {},
            build_seconds=self._cpu_clock() - begun,
        )

    def texts(self, engine: Engine, tenant: Tenant, budget: int) -> tuple[list[EdgeText], bool]:
        """What is stored that a tenant may read, edge by edge, up to so many tokens; and whether that is all of it.

        On the engine's thread too.
        """
        return engine.cache.texts(lambda namespace: may_read(owner_of(namespace), tenant), self._numbers, budget)

    def _requests(self, engine: Engine, now: float) -> tuple[list[RequestView], int]:
        running: list[RequestView] = []
        waiting: list[RequestView] = []
        more = 0
        for state in engine.requests:
            track = self.timeline.running.get(state.request.request_id)
            line, limit = (waiting, MAX_WAITING) if track is None else (running, MAX_RUNNING)
            if len(line) < limit:
                line.append(_view(state, track, now))
            elif track is None:
                more += 1
        lately = [track for track in self.timeline.ended if now - track.phases[-1][1] <= _SHOW_ENDED]
        room = MAX_RUNNING - len(running)
        ended = [_ended(track, now) for track in lately[-room:]] if room else []
        return [*running, *waiting, *ended], more


@lru_cache(maxsize=4096)
def owner_of(namespace: bytes) -> PageOwner:
    """Whose pages are in one of an engine's namespaces."""
    parts = decode_namespace(namespace)
    tenant = parts.get("tenant")
    return PageOwner(
        tenant=tenant if isinstance(tenant, bytes) else b"",
        salted=parts.get("salt") is not None,
        public="public" in parts,
    )


def may_read(owner: PageOwner, tenant: Tenant) -> bool:
    """Whether a tenant may see what pages say: its own, but for those that its clients keep apart by a salt."""
    return owner.public or (owner.tenant == tenant.salt and not owner.salted)


def _by_tier(admissions: Iterable[tuple[int, Mapping[str, int]]]) -> dict[str, int]:
    tiers = {"pool": 0}
    for cached, below in admissions:
        tiers["pool"] += cached
        for name, tokens in below.items():
            tiers[name] = tiers.get(name, 0) + tokens
            tiers["pool"] -= tokens
    return tiers


def _view(state: RequestState, track: Track | None, now: float) -> RequestView:
    sequences, request = state.sequences, state.request
    first = sequences[0] if sequences else None
    leases = [lease for sequence in sequences for lease in sequence.leases]
    distinct = leases[0].pages if len(leases) == 1 else {page for lease in leases for page in lease.pages}
    phases: list[tuple[Phase, float]] = [("queued", state.arrival)] if track is None else track.phases
    return RequestView(
        id=request.request_id,
        phases=[(phase, now - began) for phase, began in phases],
        tenant=request.tenant.name,
        prompt_tokens=len(request.prompt_ids),
        cached_tokens=state.cached_tokens,
        computed_tokens=first.lease.computed if first is not None and first.lease is not None else 0,
        generated_tokens=state.completion_tokens,
        max_tokens=state.max_tokens,
        preemptions=sum(sequence.preemptions for sequence in sequences),
        choices=sum(sequence.seats for sequence in sequences),
        pages=len(distinct),
    )


def _ended(track: Track, now: float) -> RequestView:
    return RequestView(
        id=track.request_id,
        phases=[(phase, now - began) for phase, began in track.phases],
        tenant=track.tenant,
        prompt_tokens=track.prompt_tokens,
        cached_tokens=track.cached_tokens,
        computed_tokens=0,
        generated_tokens=track.generated_tokens,
        max_tokens=0,
        preemptions=0,
        choices=0,
        pages=0,
        reason=track.reason,
    )
