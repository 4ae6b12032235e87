"""Log-probabilities in the two forms OpenAI has for them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pagetrie.engine.runner import TokenLogprob
from pagetrie.server.text_api import TokenizerLike


class TokenNames:
    """Names of tokens for people. Byte sequences that are no UTF-8 by themselves are written as ``\\xe2\\x82``."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self.name = lru_cache(maxsize=65536)(self._name)

    def bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token)

    def _name(self, token: int) -> str:
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(names: TokenNames, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The chat form: ``{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}``."""
    content = [
        {
            **_chat_entry(names, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_entry(names, token, logprob) for token, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_entry(names: TokenNames, token: int, logprob: float) -> dict[str, Any]:
    return {"token": names.name(token), "logprob": logprob, "bytes": list(names.bytes(token))}


class LegacyLogprobs:
    """The completions form, chunk by chunk: parallel lists with each token's place in the choice's text.

    A token that starts inside a character has the offset of that character.
    """

    def __init__(self, tokenizer: TokenizerLike, names: TokenNames, skip_special_tokens: bool) -> None:
        self._names = names
        self._special = tokenizer.special_ids
        self._skip_special = skip_special_tokens
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, ids: Sequence[int], entries: Sequence[TokenLogprob | None], text: str) -> dict[str, Any]:
        """The echoed prompt's tokens; the first has no log-probability. ``text`` is the prompt as echoed."""
        block = _empty_block()
        for token, entry in zip(ids, entries, strict=True):
            # A special token is in the echoed text if the client wrote it there, and is not if we put it in front.
            hidden = token in self._special and not text.startswith(self._names.name(token), self._offset)
            self._append(block, token, entry, hidden)
        self._decoder.reset()
        self._offset = len(text)
        return block

    def output(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Generated tokens."""
        block = _empty_block()
        for entry in entries:
            hidden = self._skip_special and entry.token_id in self._special
            self._append(block, entry.token_id, entry, hidden)
        return block

    def _append(self, block: dict[str, Any], token: int, entry: TokenLogprob | None, hidden: bool) -> None:
        block["tokens"].append(self._names.name(token))
        block["text_offset"].append(self._offset)
        if not hidden:
            self._offset += len(self._decoder.decode(self._names.bytes(token)))
        if entry is None:
            block["token_logprobs"].append(None)
            block["top_logprobs"].append(None)
            return
        top: dict[str, float] = {}
        for other, logprob in entry.top:
            top.setdefault(self._names.name(other), logprob)
        top[self._names.name(token)] = entry.logprob
        block["token_logprobs"].append(entry.logprob)
        block["top_logprobs"].append(top)


def join_blocks(*blocks: dict[str, Any]) -> dict[str, Any]:
    """Blocks of the completions form one after the other."""
    return {key: [item for block in blocks for item in block[key]] for key in _empty_block()}


def _empty_block() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
