"""Gathering a stream into whole choices."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from pagetrie.engine.runner import TokenLogprob
from pagetrie.errors import EngineError
from pagetrie.server.fanin import OutputStream


@dataclass(slots=True)
class Choice:
    """One finished choice."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


def likeliest(choices: list[Choice], drawn: int, wanted: int) -> list[Choice]:
    """The ``wanted`` best of each run of ``drawn`` choices, best first, by mean log-probability per token.

    Choices that come with logprobs are ranked; where as many are wanted as were drawn, they stay in order.
    """
    if drawn == wanted:
        return choices
    best: list[Choice] = []
    for start in range(0, len(choices), drawn):
        best += sorted(choices[start : start + drawn], key=_mean_logprob, reverse=True)[:wanted]
    return best


def _mean_logprob(choice: Choice) -> float:
    return sum(entry.logprob for entry in choice.logprobs) / len(choice.logprobs) if choice.logprobs else -inf


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
