"""Where the engine reports what it did. Metrics, logs and dashboards listen; the engine knows none of them."""

from __future__ import annotations

from dataclasses import dataclass

from pagetrie.engine.output import FinishReason


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
class AdmissionReport:
    """A request got its first seat. Reported once per request, never again after a preemption."""

    request_id: str
    queue_time: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class TokenReport:
    """A choice got a token. ``gap`` is the time since its previous one; for the first, since arrival (TTFT)."""

    request_id: str
    first: bool
    gap: float


@dataclass(slots=True)
class FinishReport:
    """A choice ended. Times are seconds; ``None`` where the request never got so far."""

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


class EngineObserver:
    """Hears everything and does nothing; subclass and override what you need. Called on the engine's thread."""

    def on_step(self, report: StepReport) -> None:
        """A step has ended."""

    def on_admission(self, report: AdmissionReport) -> None:
        """A request was given its first seat."""

    def on_token(self, report: TokenReport) -> None:
        """A choice received a token."""

    def on_finish(self, report: FinishReport) -> None:
        """A choice has ended, for whatever reason."""
