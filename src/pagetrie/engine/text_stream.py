"""From token ids to text that may be shown: whole characters only, stop strings held back only as far as needed."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Collection, Sequence
from typing import Protocol


class Vocabulary(Protocol):
    """What the engine must know of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> Collection[int]:
        """Every id that ends a generation."""
        ...

    @property
    def special_ids(self) -> Collection[int]: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The token's exact bytes; a text's tokens' bytes joined are its UTF-8."""
        ...


class TextStream:
    """One choice's text as it grows.

    Text is held back while it ends in a proper prefix of a stop string, or in the first bytes of a character. Nothing
    else delays it.

    Args:
        vocabulary: the tokens' bytes.
        stops: strings that end the text.
        skip_special: leave special tokens out.
        pieces: the texts of tokens that are whole characters, as far as known; shared by streams of one vocabulary and
            ``skip_special``.

    Attributes:
        stopped: the stop string that was found, or None. The text before it has been handed out, nothing after it.
    """

    __slots__ = ("_between", "_decoder", "_held", "_hidden", "_pieces", "_stops", "_vocabulary", "stopped")

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: Sequence[str],
        *,
        skip_special: bool,
        pieces: dict[int, str] | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._stops = tuple(stops)
        self._hidden: Collection[int] = vocabulary.special_ids if skip_special else ()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pieces = {} if pieces is None else pieces
        # Between characters: the decoder has no first bytes of one.
        self._between = True
        self._held = ""
        self.stopped: str | None = None

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Take one token and return the text it sets free. ``may_stop=False`` ignores stop strings in its text."""
        piece = self._pieces.get(token_id) if self._between else None
        if piece is None:
            piece = self._decode(token_id)
        return self._release(piece, may_stop) if self._stops else piece

    def _decode(self, token_id: int) -> str:
        if token_id in self._hidden:
            self._pieces[token_id] = ""
            return ""
        data = self._vocabulary.token_bytes(token_id)
        with contextlib.suppress(UnicodeDecodeError):
            self._pieces.setdefault(token_id, data.decode())
        text = self._decoder.decode(data)
        self._between = not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        """No more tokens come: return what was held back."""
        if self.stopped is not None:
            return ""
        text = self._release(self._decoder.decode(b"", final=True), True)
        text, self._held = text + self._held, ""
        return text

    def _release(self, new: str, may_stop: bool) -> str:
        if not self._stops:
            return new
        text = self._held + new
        if not may_stop:
            self._held = ""
            return text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found, key=lambda match: match[0])
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends in."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
