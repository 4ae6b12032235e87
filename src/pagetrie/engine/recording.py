"""Record what a server was asked, for ``pagetrie replay``: times, lengths and page ids, but no text.

A page id is the start of a keyed hash of the page and everything before it. The key is drawn when recording begins and
kept nowhere, so that nobody, not even with the same prompts at hand, can tell what a recording is of; equal prefixes
in one recording have equal ids, and those of different tenants never do.

The cache hits to the token, and whole pages' ids don't tell of a page that begins like another. So the recorder
remembers the latest tokens (in memory only) and writes how many a new page has in common with one before it. Answers
are recorded like prompts, since the next turn of a chat hits them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from pagetrie.engine.observer import ArrivalReport, EngineObserver, FinishReport
from pagetrie.errors import ConfigError
from pagetrie.kv.eviction import make_policy
from pagetrie.kv.keys import SECRET_BYTES, ChainKeys
from pagetrie.kv.pool import PagePool
from pagetrie.kv.radix import RadixIndex
from pagetrie.kv.tokens import TOKEN_BYTES, pack_tokens

log = logging.getLogger(__name__)

VERSION = 1
ID_BYTES = 8
KNOWN_TOKENS = 1 << 20
"""Tokens that are remembered, to tell which pages begin alike: 4 MB, and as much again for what names them."""
_FLUSH_EVERY = 32


@dataclass(slots=True)
class _Open:
    time: float
    prompt: bytes
    root: bytes
    pages: list[str]
    kind: int
    output_tokens: int = 0


class _Known:
    """The latest recorded tokens, in a prefix tree of their own, least recently used out first."""

    def __init__(self, page_tokens: int) -> None:
        pages = max(64, KNOWN_TOKENS // page_tokens)
        self._pool = PagePool(pages)
        self._index = RadixIndex(self._pool, page_tokens, make_policy("lru", pages, page_tokens, lambda: 0.0))
        self._names = [""] * pages

    def add(self, root: bytes, tokens: bytes, names: list[str]) -> tuple[int, str, int] | None:
        """Remember tokens (u32 LE) and the names of their pages.

        Returns:
            The first page that wasn't known, if it begins like another: its place, the other's name, and how many
            tokens they have in common.
        """
        index, size = self._index, self._index.page_bytes
        # A first page that is the namespace's own parts the tenants.
        tokens, names = (root * (size // len(root) + 1))[:size] + tokens, ["", *names]
        if len(names) > self._pool.num_pages:
            return None
        match = index.match(b"", tokens, len(tokens) // TOKEN_BYTES)
        node, known = match.node, len(match.pages)
        like = self._names[match.partial_page] if match.partial_tokens else ""
        index.pin(node)
        new = len(names) - known
        if new > self._pool.free_pages:
            index.evict(new - self._pool.free_pages)
        pages = self._pool.allocate(new)
        for page, name in zip(pages, names[known:], strict=True):
            self._names[page] = name
        full = len(tokens) // size - known
        if full:
            end, _ = index.insert(node, tokens[known * size : (known + full) * size], pages[:full])
            if end is not node:
                index.pin(end)
                index.unpin(node)
                node = end
        if full < new and not index.insert_tail(node, tokens[(known + full) * size :], pages[-1]):
            self._pool.release(pages[-1:])
        index.touch(node, None)
        index.unpin(node)
        return (known - 1, like, match.partial_tokens) if like and known else None


class TraceRecorder(EngineObserver):
    """Writes one line per request when it ends, and one per page that begins like another.

    Args:
        path: the file to make; readable by its owner only.
        page_tokens: tokens per page id.
        secret: keys the ids, 32 bytes; drawn if None (tests give one).

    Raises:
        ConfigError: the file exists already or can't be made.
    """

    def __init__(self, path: Path, page_tokens: int, *, secret: bytes | None = None) -> None:
        self._keys = ChainKeys(secret or secrets.token_bytes(SECRET_BYTES))
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._known = _Known(page_tokens)
        self._open: dict[str, _Open] = {}
        self._start: float | None = None
        self._unflushed = 0
        self._failed = False
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ConfigError(f"won't record over {path}, which exists") from None
        except OSError as error:
            raise ConfigError(f"can't record to {path}: {error.strerror}") from error
        self._file = os.fdopen(handle, "w", encoding="utf-8")
        self._write({"pagetrie_trace": VERSION, "page_tokens": page_tokens})
        self._file.flush()

    def on_arrival(self, report: ArrivalReport) -> None:
        if self._start is None:
            self._start = report.time
        root, prompt = self._keys.root(report.namespace), pack_tokens(report.prompt_ids)
        pages = self._note(root, prompt)
        self._open[report.request_id] = _Open(report.time - self._start, prompt, root, pages, report.kind)

    def on_finish(self, report: FinishReport) -> None:
        request = self._open.get(report.request_id)
        if request is None:
            return
        request.output_tokens = max(request.output_tokens, report.generated_tokens)
        if not report.last_of_request:
            return
        del self._open[report.request_id]
        line: dict[str, object] = {
            "t": round(request.time, 6),
            "in": len(request.prompt) // TOKEN_BYTES,
            "out": request.output_tokens,
            "pages": request.pages,
        }
        if request.kind:
            line["kind"] = request.kind
        if report.n == 1 and report.output_ids:
            whole = request.prompt + pack_tokens(report.output_ids)
            line["answer"] = self._note(request.root, whole)[len(request.prompt) // self._page_bytes :]
        self._write(line)

    def close(self) -> None:
        """Write what is left and close the file. Requests that haven't ended aren't recorded."""
        with contextlib.suppress(OSError):  # what was lost has been said
            self._file.close()

    def _note(self, root: bytes, tokens: bytes) -> list[str]:
        """The ids of a sequence's pages; writes which of them begins like another."""
        key, names = root, []
        for start in range(0, len(tokens), self._page_bytes):
            key = self._keys.page(key, tokens[start : start + self._page_bytes])
            names.append(key[:ID_BYTES].hex())
        alike = self._known.add(root, tokens, names)
        if alike is not None:
            place, like, count = alike
            if names[place] != like:
                self._write({"page": names[place], "like": like, "tokens": count})
        return names

    def _write(self, line: dict[str, object]) -> None:
        """Write a line; where that fails the recording ends, and nothing else does."""
        if self._failed:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._unflushed += 1
            if self._unflushed >= _FLUSH_EVERY:
                self._unflushed = 0
                self._file.flush()
        except OSError as error:
            self._failed = True
            log.error("the recording ends here: %s", error.strerror)
