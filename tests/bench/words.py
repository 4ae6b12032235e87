"""A vocabulary of four-letter words for tests of prompts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


class WordTokenizer:
    """Token i < 3 is special; the rest are `` aaaa``, `` aaab``, ... and an unknown word is token 0."""

    def __init__(self, count: int = 2000) -> None:
        letters = itertools.islice(itertools.product("abcdefghij", repeat=4), count - 3)
        self._texts = ["<0>", "<1>", "<2>", *(f" {''.join(word)}" for word in letters)]
        self._ids = {text: index for index, text in enumerate(self._texts)}
        self.vocab_size = count

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [self._ids.get(f" {word}", 0) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._texts[index] for index in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._texts[token_id].encode()
