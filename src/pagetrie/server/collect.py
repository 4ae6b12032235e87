"""Gathering a stream into whole choices."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagetrie.engine.runner import TokenLogprob
from pagetrie.errors import EngineError
from pagetrie.server.fanin import OutputStream


@dataclass(slots=True)
class Choice:
    """One finished choice."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


async def collect(outputs: OutputStream, count: int) -> list[Choice]:
    """All ``count`` choices in order.

    Raises:
        PagetrieError: why the request failed.
    """
    choices = [Choice() for _ in range(count)]
    async for deltas in outputs:
        for delta in deltas:
            choice = choices[delta.index]
            choice.text += delta.text
            choice.logprobs += delta.logprobs
            choice.finish_reason = delta.finish_reason or choice.finish_reason
    if any(choice.finish_reason is None for choice in choices):
        raise EngineError("the engine ended the request before all choices were finished")
    return choices
