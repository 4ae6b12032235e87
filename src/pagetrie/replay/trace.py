"""Recorded traffic: requests with times, lengths and page ids, but no text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pagetrie.errors import ConfigError
from pagetrie.kv import RequestKind

TraceFormat = Literal["mooncake", "bailian", "vllm", "pagetrie"]

MOONCAKE_PAGE_TOKENS = 512
BAILIAN_PAGE_TOKENS = 16
VLLM_PAGE_TOKENS = 16
MAX_TOKENS = 1 << 24
"""Longest prompt or answer that is believed, in tokens."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        time: seconds since the trace began.
        prompt_tokens, output_tokens: lengths.
        pages: ids of the prompt's pages, prefix-chained: an equal id means an equal page behind an equal prefix. The
            last page may be filled in part.
        kind: what it was, where that is known.
        answer: ids of the pages that hold the answer, from the one that the prompt ends in; empty if they aren't known.
    """

    time: float
    prompt_tokens: int
    output_tokens: int
    pages: list[int]
    answer: list[int] = field(default_factory=list)
    kind: RequestKind = RequestKind.UNKNOWN


@dataclass(slots=True)
class Trace:
    """Requests in order of time.

    Attributes:
        page_tokens: tokens per page id.
        alike: for a page that begins like another one behind the same prefix, that one and how many tokens they have
            in common.
    """

    name: str
    page_tokens: int
    requests: list[TraceRequest] = field(default_factory=list)
    alike: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def pages(self) -> int:
        """Pages asked for, over all requests."""
        return sum(len(request.pages) for request in self.requests)

    def prompt_ids(self, request: TraceRequest) -> list[int]:
        """Made-up tokens, from 1 on, that are equal where those of the recorded prompts were."""
        return self._tokens(request.pages)[: request.prompt_tokens]

    def answer_ids(self, request: TraceRequest) -> list[int]:
        """The same for its answer; empty if its pages aren't known."""
        begin = request.prompt_tokens % self.page_tokens
        return self._tokens(request.answer)[begin : begin + request.output_tokens]

    def _tokens(self, pages: Iterable[int]) -> list[int]:
        size, ids = self.page_tokens, []
        for page in pages:
            begin = size
            tokens: list[int] = []
            # The end is the page's own, what comes before it is another's, as far as they are alike.
            while page in self.alike:
                other, count = self.alike[page]
                count = min(count, begin)
                tokens[:0] = range(1 + page * size + count, 1 + page * size + begin)
                page, begin = other, count
            ids += [*range(1 + page * size, 1 + page * size + begin), *tokens]
        return ids


def read_trace(path: Path, *, form: TraceFormat | None = None, page_tokens: int | None = None) -> Trace:
    """Read a trace: a JSON object per line.

    ===========  ===========================================================================================
    mooncake     {"timestamp": ms, "input_length", "output_length", "hash_ids"}, 512 tokens per id
    vllm         the same fields (its ``timed_trace`` data set), 16 tokens per id unless told
    bailian      {"chat_id", "parent_chat_id", "timestamp": s, "input_length", "output_length", "type", "turn",
                 "hash_ids"}, 16 tokens per id
    pagetrie     {"pagetrie_trace": 1, "page_tokens": n}, then {"t": s, "in", "out", "pages": [...], "answer": [...],
                 "kind"}, the last two optional, and {"page", "like", "tokens": n} for pages that begin alike, as
                 ``serve --record`` writes it
    ===========  ===========================================================================================

    Args:
        form: which of them; found out from the first line if None. Mooncake's and vLLM's look the same and differ in
            the tokens per id; the number of ids of the first requests tells which it is.
        page_tokens: tokens per id, if it isn't the format's usual number.

    Raises:
        ConfigError: the file can't be read or a line isn't what it should be; says which line.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return _parse(path.name, file, form, page_tokens)
    except OSError as error:
        raise ConfigError(f"can't read the trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the trace {path} is not UTF-8 text") from error


def _parse(name: str, lines: Iterable[str], form: TraceFormat | None, page_tokens: int | None) -> Trace:
    objects = _objects(name, lines)
    try:
        number, first = next(objects)
    except StopIteration:
        raise ConfigError(f"the trace {name} is empty") from None
    form = form or _recognise(name, first)
    if form == "pagetrie":
        size = first.get("page_tokens")
        if first.get("pagetrie_trace") != 1 or not isinstance(size, int) or not 0 < size <= 1 << 16:
            raise ConfigError(f"{name}, line {number}: not the first line of a recorded trace of version 1")
        rest = objects
    else:
        size = page_tokens or _usual_size(form, first)
        rest = _chain((number, first), objects)
    trace = Trace(name, size)
    scale = 1.0 if form in ("bailian", "pagetrie") else 1e-3
    fields = ("t", "in", "out", "pages") if form == "pagetrie" else _LONG_FIELDS
    ids: dict[int | str, int] = {}
    for number, line in rest:
        if form == "pagetrie" and "like" in line:
            _alike(f"{name}, line {number}", line, trace, ids)
            continue
        trace.requests.append(_request(f"{name}, line {number}", line, fields, scale, size, ids))
    trace.requests.sort(key=lambda request: request.time)
    return trace


_LONG_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def _objects(name: str, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            parsed = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name}, line {number}: not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise ConfigError(f"{name}, line {number}: an object was expected")
        yield number, parsed


def _chain(first: tuple[int, dict[str, Any]], rest: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[Any]:
    yield first
    yield from rest


def _recognise(name: str, first: dict[str, Any]) -> TraceFormat:
    if "pagetrie_trace" in first:
        return "pagetrie"
    if "chat_id" in first:
        return "bailian"
    if all(key in first for key in _LONG_FIELDS):
        return "mooncake" if _usual_size(None, first) == MOONCAKE_PAGE_TOKENS else "vllm"
    raise ConfigError(
        f"{name}: the first line looks like no known trace; it has {', '.join(sorted(first)) or 'nothing'}"
    )


def _usual_size(form: TraceFormat | None, first: dict[str, Any]) -> int:
    """Tokens per id: as many as make the number of ids fit the length, else the format's usual number."""
    if form == "bailian":
        return BAILIAN_PAGE_TOKENS
    length, ids = first.get("input_length"), first.get("hash_ids")
    if isinstance(length, int) and isinstance(ids, list) and form != "mooncake":
        for size in (VLLM_PAGE_TOKENS, MOONCAKE_PAGE_TOKENS):
            if len(ids) == -(-length // size):
                return size
    return MOONCAKE_PAGE_TOKENS if form == "mooncake" else VLLM_PAGE_TOKENS


def _alike(where: str, line: dict[str, Any], trace: Trace, ids: dict[int | str, int]) -> None:
    page, like, count = (line.get(key) for key in ("page", "like", "tokens"))
    if not isinstance(page, int | str) or not isinstance(like, int | str):
        raise ConfigError(f"{where}: page and like must be page ids")
    if not isinstance(count, int) or not 0 < count < trace.page_tokens:
        raise ConfigError(f"{where}: tokens must be between 1 and {trace.page_tokens - 1}, got {count!r}")
    number, other = (ids.setdefault(one, len(ids)) for one in (page, like))
    above: int | None = other
    while above is not None and above != number:
        above = trace.alike[above][0] if above in trace.alike else None
    if above is None:  # else it has long been told the other way round
        trace.alike.setdefault(number, (other, count))


def _request(
    where: str,
    line: dict[str, Any],
    fields: tuple[str, str, str, str],
    scale: float,
    page_tokens: int,
    ids: dict[int | str, int],
) -> TraceRequest:
    try:
        time, prompt, output, pages = (line[key] for key in fields)
    except KeyError as error:
        raise ConfigError(f"{where}: {error.args[0]!r} is missing") from None
    if not isinstance(time, int | float) or not math.isfinite(time) or time < 0:
        raise ConfigError(f"{where}: the time must be a number from 0, got {time!r}")
    for length in (prompt, output):
        if not isinstance(length, int) or not 0 <= length <= MAX_TOKENS:
            raise ConfigError(f"{where}: lengths must be between 0 and {MAX_TOKENS} tokens, got {length!r}")
    if not isinstance(pages, list) or not all(isinstance(page, int | str) for page in pages):
        raise ConfigError(f"{where}: page ids must be a list of numbers or strings")
    if len(pages) != -(-prompt // page_tokens):
        raise ConfigError(
            f"{where}: {len(pages)} page ids for {prompt} tokens; at {page_tokens} tokens per page "
            f"{-(-prompt // page_tokens)} were expected (other sizes: --page-tokens)"
        )
    answer = line.get("answer", [])
    if not isinstance(answer, list) or not all(isinstance(page, int | str) for page in answer):
        raise ConfigError(f"{where}: the answer's page ids must be a list of numbers or strings")
    if answer and len(answer) != -(-(prompt % page_tokens + output) // page_tokens):
        raise ConfigError(f"{where}: {len(answer)} page ids for an answer of {output} tokens")
    kind = line.get("kind", 0)
    if not isinstance(kind, int) or not 0 <= kind <= max(RequestKind):
        raise ConfigError(f"{where}: kind must be between 0 and {max(RequestKind)}, got {kind!r}")
    # Ids are renumbered from 0, so that any of them fits 32 bits.
    numbered, answered = ([ids.setdefault(page, len(ids)) for page in part] for part in (pages, answer))
    return TraceRequest(time * scale, prompt, output, numbered, answered, RequestKind(kind))
