"""Where the engine reports what it did. Metrics, logs and dashboards listen; the engine knows none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagetrie.engine.cache_records import MissReason
from pagetrie.engine.output import FinishReason
from pagetrie.engine.params import SamplingParams
from pagetrie.kv import RequestKind


@dataclass(slots=True)
class StepReport:
    """One step, in numbers. Times are seconds of the engine's clock.

    Attributes:
        time: when the step ended.
        duration: how long it took.
        running, waiting: sequences with a seat; requests (and preempted sequences) without one.
        computed_tokens: tokens the model ran over (prefill and decode).
        prefill_tokens: those of them that belong to prompts or to recomputation after a preemption.
        generated_tokens: tokens delivered to choices.
        preemptions: sequences put back in the queue during this step.
    """

    time: float
    duration: float
    running: int
    waiting: int
    computed_tokens: int
    prefill_tokens: int
    generated_tokens: int
    preemptions: int


@dataclass(slots=True)
class ArrivalReport:
    """A request was taken, at ``time`` of the engine's clock; ``namespace`` is that of its pages."""

    request_id: str
    time: float
    prompt_ids: Sequence[int]
    namespace: bytes
    params: SamplingParams
    trace_headers: Mapping[str, str]
    kind: RequestKind = RequestKind.UNKNOWN


@dataclass(slots=True)
class AdmissionReport:
    """A request got its first seat. Reported once per request, never again after a preemption.

    Attributes:
        queue_time: seconds since its arrival.
        cached_by_tier: of the cached tokens, those that came from a tier below the pool.
        reason: why the others weren't cached.
        time: when, in seconds of the engine's clock.
        wait_time: of the queue time, what it waited for pages that another request computed or a tier delivered.
        tenant: whose request it is.
    """

    request_id: str
    queue_time: float
    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    reason: MissReason = "never_stored"
    time: float = 0.0
    wait_time: float = 0.0
    tenant: str = ""


@dataclass(slots=True)
class SeatReport:
    """A choice lost its seat to a preemption, or got one again afterwards."""

    request_id: str
    index: int
    time: float
    seated: bool


@dataclass(slots=True)
class RejoinReport:
    """A request whose first tokens were computed found so many more of its prompt, loaded from tiers meanwhile."""

    request_id: str
    time: float
    cached_tokens: int
    cached_by_tier: Mapping[str, int]


@dataclass(slots=True)
class PrefillReport:
    """A step computed ``tokens`` of a prompt (or of what a preempted sequence has to compute again).

    ``position`` is where they begin; ``start`` is the step's, ``end`` when the model was done, in seconds of the
    engine's clock.
    """

    request_id: str
    position: int
    tokens: int
    start: float
    end: float


@dataclass(slots=True)
class TokenReport:
    """A choice got a token, at ``time``. ``gap`` is the time since its previous one; for the first, since arrival."""

    request_id: str
    first: bool
    gap: float
    time: float = 0.0


@dataclass(slots=True)
class FinishReport:
    """A choice ended, at ``time``, with ``output_ids``. Times are seconds; ``None`` where it never got so far."""

    request_id: str
    reason: FinishReason
    n: int
    max_tokens: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    e2e_time: float
    queue_time: float | None
    prefill_time: float | None
    decode_time: float | None
    last_of_request: bool
    time: float = 0.0
    tenant: str = ""
    output_ids: Sequence[int] = ()


class EngineObserver:
    """Hears everything and does nothing; subclass and override what you need. Called on the engine's thread."""

    def on_step(self, report: StepReport) -> None:
        """A step has ended."""

    def on_arrival(self, report: ArrivalReport) -> None:
        """A request was queued."""

    def on_admission(self, report: AdmissionReport) -> None:
        """A request was given its first seat."""

    def on_seat(self, report: SeatReport) -> None:
        """A choice was preempted, or runs again."""

    def on_rejoin(self, report: RejoinReport) -> None:
        """A request found more of its prompt than at its admission."""

    def on_prefill(self, report: PrefillReport) -> None:
        """A part of a prompt has been computed."""

    def on_token(self, report: TokenReport) -> None:
        """A choice received a token."""

    def on_finish(self, report: FinishReport) -> None:
        """A choice has ended, for whatever reason."""


class Observers(EngineObserver):
    """Several observers as one; each is only called for what it overrides."""

    def __init__(self, observers: Sequence[EngineObserver]) -> None:
        def listening(name: str) -> list[EngineObserver]:
            return [o for o in observers if getattr(type(o), name) is not getattr(EngineObserver, name)]

        self._step = [o.on_step for o in listening("on_step")]
        self._arrival = [o.on_arrival for o in listening("on_arrival")]
        self._admission = [o.on_admission for o in listening("on_admission")]
        self._seat = [o.on_seat for o in listening("on_seat")]
        self._rejoin = [o.on_rejoin for o in listening("on_rejoin")]
        self._prefill = [o.on_prefill for o in listening("on_prefill")]
        self._token = [o.on_token for o in listening("on_token")]
        self._finish = [o.on_finish for o in listening("on_finish")]

    def on_step(self, report: StepReport) -> None:
        for tell in self._step:
            tell(report)

    def on_arrival(self, report: ArrivalReport) -> None:
        for tell in self._arrival:
            tell(report)

    def on_admission(self, report: AdmissionReport) -> None:
        for tell in self._admission:
            tell(report)

    def on_seat(self, report: SeatReport) -> None:
        for tell in self._seat:
            tell(report)

    def on_rejoin(self, report: RejoinReport) -> None:
        for tell in self._rejoin:
            tell(report)

    def on_prefill(self, report: PrefillReport) -> None:
        for tell in self._prefill:
            tell(report)

    def on_token(self, report: TokenReport) -> None:
        for tell in self._token:
            tell(report)

    def on_finish(self, report: FinishReport) -> None:
        for tell in self._finish:
            tell(report)
