"""Where two prompts part: the first differing token with the text around it on both sides, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Protocol

SHOWN = 16
"""Tokens of text shown after the first differing one."""
_SAME_AGAIN = 16
"""So many equal tokens after a difference are no accident."""


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Part:
    """Two texts that were equal up to a place.

    Attributes:
        position: tokens before it.
        before: the last of those.
        here: what one text goes on with.
        stored: what the other one, which is stored, goes on with.
    """

    position: int
    before: Sequence[int]
    here: Sequence[int]
    stored: Sequence[int]


def describe_part(part: Part, tokenizer: Decoder) -> dict[str, Any]:
    """Both sides as text, and the differing tokens themselves."""

    def side(ids: Sequence[int]) -> dict[str, Any]:
        token = ids[0] if ids else None
        return {
            "token": token,
            "token_text": "" if token is None else tokenizer.decode([token], skip_special=False),
            "text": tokenizer.decode(ids[:SHOWN], skip_special=False),
        }

    return {
        "position": part.position,
        "before": tokenizer.decode(part.before, skip_special=False),
        "here": side(part.here),
        "stored": side(part.stored),
    }


def same_again(part: Part) -> tuple[int, int] | None:
    """Tokens after which the texts are the same again, and for how long at least; None if they aren't."""
    matcher = SequenceMatcher(None, part.here, part.stored, autojunk=False)
    match = matcher.find_longest_match()
    return (match.a, match.size) if match.size >= _SAME_AGAIN else None


def advice_on(part: Part, rewrites: str = "", *, surely: bool = False) -> list[dict[str, str]]:
    """What would have made the second text hit the first.

    Args:
        part: where they part.
        rewrites: what to call the earlier request whose answer one of them seems to write otherwise; empty for none.
        surely: it does; else only if the texts are the same again further on.
    """
    again = same_again(part)
    if rewrites and (surely or again is not None):
        text = (
            f"The stored text goes on with the answer to {rewrites}, which this prompt doesn't repeat as it came: the "
            "chat template rewrites the last turn (leaves out its reasoning, or opens it with other words), or the "
            "answer was changed before it was sent back. Send answers back as they came; /v1/contexts with append "
            "keeps the tokens themselves."
        )
        return [{"code": "rewritten_last_turn", "text": text}]
    if again is not None:
        text = (
            f"About {again[0]} tokens differ (a date, a name, an id?), then at least {again[1]} are the same again. "
            "Put what changes from request to request behind what stays: only a common beginning can be shared."
        )
        return [{"code": "volatile_before_stable", "text": text}]
    return []
