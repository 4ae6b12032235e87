"""Record what a server was asked, for ``pagetrie replay``: times, lengths and page ids, but no text.

A page id is the start of a keyed hash of the page and everything before it. The key is drawn when recording begins and
kept nowhere, so that nobody, not even with the same prompts at hand, can tell what a recording is of; equal prefixes
in one recording have equal ids, and those of different tenants never do.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from pagetrie.engine.observer import ArrivalReport, EngineObserver, FinishReport
from pagetrie.errors import ConfigError
from pagetrie.kv.keys import SECRET_BYTES, ChainKeys
from pagetrie.kv.tokens import TOKEN_BYTES, pack_tokens

VERSION = 1
ID_BYTES = 8
_FLUSH_EVERY = 32


@dataclass(slots=True)
class _Open:
    time: float
    prompt_tokens: int
    pages: list[str]
    output_tokens: int = 0


class TraceRecorder(EngineObserver):
    """Writes one line per request when it ends.

    Args:
        path: the file to make; readable by its owner only.
        page_tokens: tokens per page id.
        secret: keys the ids, 32 bytes; drawn if None (tests give one).

    Raises:
        ConfigError: the file exists already or can't be made.
    """

    def __init__(self, path: Path, page_tokens: int, *, secret: bytes | None = None) -> None:
        self._keys = ChainKeys(secret or secrets.token_bytes(SECRET_BYTES))
        self._page_tokens = page_tokens
        self._open: dict[str, _Open] = {}
        self._start: float | None = None
        self._unflushed = 0
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
        self._open[report.request_id] = _Open(report.time - self._start, len(report.prompt_ids), self._page_ids(report))

    def on_finish(self, report: FinishReport) -> None:
        request = self._open.get(report.request_id)
        if request is None:
            return
        request.output_tokens = max(request.output_tokens, report.generated_tokens)
        if report.last_of_request:
            del self._open[report.request_id]
            self._write(
                {
                    "t": round(request.time, 6),
                    "in": request.prompt_tokens,
                    "out": request.output_tokens,
                    "pages": request.pages,
                }
            )

    def close(self) -> None:
        """Write what is left and close the file. Requests that haven't ended aren't recorded."""
        self._file.close()

    def _page_ids(self, report: ArrivalReport) -> list[str]:
        packed, size = pack_tokens(report.prompt_ids), self._page_tokens * TOKEN_BYTES
        key = self._keys.root(report.namespace)
        ids = []
        for start in range(0, len(packed), size):
            key = self._keys.page(key, packed[start : start + size])
            ids.append(key[:ID_BYTES].hex())
        return ids

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._unflushed += 1
        if self._unflushed >= _FLUSH_EVERY:
            self._unflushed = 0
            self._file.flush()
