"""What happened to the latest requests, and when: for a timeline, percentiles and hit rates of a live view."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pagetrie.engine.observer import (
    AdmissionReport,
    EngineObserver,
    FinishReport,
    RejoinReport,
    SeatReport,
    StepReport,
    TokenReport,
)

Phase = Literal["queued", "prefill", "decode", "preempted", "done"]

KEPT_REQUESTS = 128
KEPT_SAMPLES = 1024
_MAX_PHASES = 32


@dataclass(slots=True)
class Track:
    """A request's way through the engine. Times are seconds of the engine's clock.

    Attributes:
        phases: each phase and when it began; the last one lasts on.
        tenant: whose request it is.
        prompt_tokens, cached_tokens: as in its usage.
        lost: choices without a seat since they were preempted.
        generated_tokens: of the choices that have ended.
        reason: how it ended; empty while it runs.
    """

    request_id: str
    phases: list[tuple[Phase, float]]
    tenant: str
    prompt_tokens: int
    cached_tokens: int = 0
    lost: int = 0
    generated_tokens: int = 0
    reason: str = ""

    def enter(self, phase: Phase, time: float) -> None:
        if self.phases[-1][0] == phase:
            return
        if len(self.phases) == _MAX_PHASES and phase != "done":
            return  # preempted over and over; the picture is clear by now
        self.phases.append((phase, time))


@dataclass(slots=True)
class Totals:
    """Counts since start.

    Attributes:
        prefill_tokens, generated_tokens: computed for prompts; handed out.
        preemptions: sequences that lost their seats.
        misses: requests by why the rest of their prompt wasn't cached.
    """

    prefill_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    misses: dict[str, int] = field(default_factory=dict)


class Timeline(EngineObserver):
    """Keeps the latest requests' tracks. Written and read on the engine's thread.

    Attributes:
        running: tracks of requests that had a seat and haven't ended, by id.
        ended: the latest that have.
        first_tokens, token_times: (when, seconds) of the latest first tokens, and of the mean time per further token.
        admissions: (when, prompt tokens, cached tokens, those of them by tier below the pool) of the latest.
        totals: counts.
    """

    def __init__(self) -> None:
        self.running: dict[str, Track] = {}
        self.ended: deque[Track] = deque(maxlen=KEPT_REQUESTS)
        self.first_tokens: deque[tuple[float, float]] = deque(maxlen=KEPT_SAMPLES)
        self.token_times: deque[tuple[float, float]] = deque(maxlen=KEPT_SAMPLES)
        self.admissions: deque[tuple[float, int, int, Mapping[str, int]]] = deque(maxlen=KEPT_SAMPLES)
        self.totals = Totals()

    def on_step(self, report: StepReport) -> None:
        totals = self.totals
        totals.prefill_tokens += report.prefill_tokens
        totals.generated_tokens += report.generated_tokens
        totals.preemptions += report.preemptions

    def on_admission(self, report: AdmissionReport) -> None:
        now = report.time
        self.running[report.request_id] = Track(
            report.request_id,
            [("queued", now - report.queue_time), ("prefill", now)],
            report.tenant,
            report.prompt_tokens,
            report.cached_tokens,
        )
        self.admissions.append((now, report.prompt_tokens, report.cached_tokens, report.cached_by_tier))
        misses = self.totals.misses
        misses[report.reason] = misses.get(report.reason, 0) + 1

    def on_rejoin(self, report: RejoinReport) -> None:
        track = self.running.get(report.request_id)
        if track is not None:
            track.cached_tokens += report.cached_tokens
        self.admissions.append((report.time, 0, report.cached_tokens, report.cached_by_tier))

    def on_seat(self, report: SeatReport) -> None:
        track = self.running.get(report.request_id)
        if track is None:
            return
        track.lost += -1 if report.seated else 1
        if track.lost:
            track.enter("preempted", report.time)
        else:
            track.enter("prefill", report.time)  # what its pages don't hold any more is computed again

    def on_token(self, report: TokenReport) -> None:
        track = self.running.get(report.request_id)
        if track is None or track.phases[-1][0] == "decode":
            return
        if report.first:
            self.first_tokens.append((report.time, report.gap))
        if not track.lost:
            track.enter("decode", report.time)

    def on_finish(self, report: FinishReport) -> None:
        if report.decode_time is not None and report.generated_tokens > 1:
            self.token_times.append((report.time, report.decode_time / (report.generated_tokens - 1)))
        track = self.running.get(report.request_id)
        if track is None:
            if report.last_of_request:  # it never got a seat
                phases: list[tuple[Phase, float]] = [("queued", report.time - report.e2e_time), ("done", report.time)]
                track = Track(report.request_id, phases, report.tenant, report.prompt_tokens, reason=report.reason)
                self.ended.append(track)
            return
        track.generated_tokens += report.generated_tokens
        if report.last_of_request:
            del self.running[report.request_id]
            track.enter("done", report.time)
            track.reason = report.reason
            self.ended.append(track)


def percentiles(samples: Iterable[float], wanted: Iterable[float] = (0.5, 0.9, 0.99)) -> list[float]:
    """The samples at these ranks (nearest rank); none of no samples."""
    ordered = sorted(samples)
    return [ordered[min(len(ordered) - 1, int(rank * len(ordered)))] for rank in wanted] if ordered else []
