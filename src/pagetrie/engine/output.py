"""What the engine hands back: deltas per step, in the order they were made.

Structs of msgspec, since one of each is made per token; what can't be part of a cycle is kept out of collections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct, field

from pagetrie.engine.runner import TokenLogprob
from pagetrie.errors import PagetrieError

FinishReason = Literal["stop", "length", "abort", "error", "timeout"]


class ChoiceDelta(Struct, gc=False):
    """What one choice gained in a step.

    Attributes:
        index: the choice, 0 to n-1.
        text: new text, whole characters only; never part of a stop string.
        token_ids: new token ids (a stop token id is not among them; a token whose text is still held back is).
        logprobs: one entry per new token id if asked for, else empty.
        finish_reason: set on the last delta of the choice; each choice gets exactly one.
        stop_reason: the stop string or stop token id that ended the text; None for end-of-sequence.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class RequestOutput(Struct):
    """One request's news after a step.

    Attributes:
        request_id: the request.
        choices: deltas, at most one per choice.
        prompt_tokens: length of the prompt.
        cached_tokens: prompt tokens taken from the cache at first admission; 0 on a miss, never above the prompt.
        completion_tokens: tokens generated so far over all choices.
        prompt_logprobs: with the first output, if asked for: one entry per prompt token, the first None.
        finished: every choice has ended; nothing follows.
        error: why the request failed, with ``finished``.
        cached_by_tier: cached tokens that came from a tier below the pool (``ram``, ``disk``, ``store``).
    """

    request_id: str
    choices: list[ChoiceDelta] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finished: bool = False
    error: PagetrieError | None = None
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
