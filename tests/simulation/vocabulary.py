"""Forty tokens that make text awkward: few letters, so that stop strings nearly come true, and broken characters."""

from __future__ import annotations

EOS = frozenset({0, 1})
SPECIAL = frozenset({0, 1, 2})

_PIECES = (
    [b"<eos>", b"<end>", b"<s>"]
    + [b"a", b"b", b"c", b"ab", b"ba", b"abc", b"cab", b" ", b"\n"] * 2
    + [b"\xc3", b"\xa9", b"\xc3\xa9", b"\xe2\x82", b"\xac", b"\xff", b"x", b"y", b"z", b"xy", b"yz", b"a b"]
    + [b"d", b"e", b"f", b"g", b"h", b"i", b"j"]
)


class AwkwardVocabulary:
    """``engine.text_stream.Vocabulary`` of 40 tokens: 0 and 1 end a text, 2 is special."""

    vocab_size = len(_PIECES)
    eos_ids = EOS
    special_ids = SPECIAL

    def token_bytes(self, token_id: int) -> bytes:
        return _PIECES[token_id]
