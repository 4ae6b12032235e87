"""An engine double and a byte tokenizer for tests of the HTTP layer: scripted, instant unless held, without threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagetrie.engine.output import ChoiceDelta, RequestOutput
from pagetrie.engine.request import Request
from pagetrie.engine.runner import TokenLogprob
from pagetrie.engine.tenant import Tenant
from pagetrie.errors import EngineError, InvalidRequestError, QueueFullError
from pagetrie.kv import TransferReport

BOS, EOS = 256, 257
VOCABULARY = 258


class ByteTokenizer:
    """One token per byte, a BOS put in front of plain prompts, and an end token."""

    vocab_size = VOCABULARY
    special_ids = frozenset((BOS, EOS))

    def __init__(self, *, add_bos: bool = True) -> None:
        self.add_bos = add_bos
        self.before_encode: Callable[[str], None] = lambda text: None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        self.before_encode(text)
        return [BOS] * (add_special and self.add_bos) + list(text.encode())

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids if not (skip_special and i in self.special_ids)).decode(
            "utf-8", "replace"
        )

    def token_bytes(self, token_id: int) -> bytes:
        return {BOS: b"<s>", EOS: b"</s>"}.get(token_id) or bytes([token_id])

    def token_text(self, token_id: int) -> str | None:
        return self.token_bytes(token_id).decode("latin-1")

    def check_ids(self, ids: Sequence[int], *, param: str | None = None) -> None:
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise InvalidRequestError(f"token id {i} is outside the vocabulary of {self.vocab_size}", param=param)


class PlainTemplate:
    """``role: content`` lines; what was passed is kept for inspection."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        self.calls.append(
            {
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                **kwargs,
            }
        )
        text = "".join(f"{m['role']}: {_text(m['content'])}\n" for m in messages)
        return text + ("assistant: " if add_generation_prompt else "")


def _text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


@dataclass(frozen=True)
class Snapshot:
    running: int = 0
    waiting: int = 0
    total_pages: int = 100
    free_pages: int = 70
    active_pages: int = 10
    cached_pages: int = 17
    loading_pages: int = 3
    page_size: int = 16
    evicted_pages: int = 5
    cow_copies: int = 3
    pinned_pages: int = 4
    contexts: int = 2
    deferred: int = 0


@dataclass(frozen=True)
class ResetReport:
    freed_pages: int
    busy_pages: int


class Stream:
    """A request's outputs as the double's script makes them; remembers how it ended."""

    def __init__(self, request: Request, outputs: AsyncIterator[RequestOutput]) -> None:
        self.request = request
        self.closed = asyncio.Event()
        self.finished = False
        self._outputs = outputs

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        output = await self._outputs.__anext__()
        self.finished = self.finished or output.finished
        return output

    async def aclose(self) -> None:
        self.closed.set()


@dataclass
class EngineDouble:
    """Answers each request with ``text`` (choice i with its i-th item), ``chunk`` tokens per step.

    ``gate``: when set to an event, every step after the first ``free_steps`` waits for it.
    ``fail_after``: raise ``failure`` in place of the step with that number.
    """

    texts: Sequence[str] = ("Hello!",)
    chunk: int = 2
    max_len: int = 200
    max_queue: int = 1000
    cached: int = 0
    gate: asyncio.Event | None = None
    free_steps: int = 1
    fail_after: int | None = None
    tenants: list[dict[str, Tenant]] = field(default_factory=list)
    failure: Exception = field(default_factory=lambda: RuntimeError("secret detail"))
    alive: bool = True
    still: float = 0.0
    aborting: bool = False
    streams: list[Stream] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    stops: list[float] = field(default_factory=list)
    numbers: Snapshot = Snapshot()
    tiers: TransferReport | None = None

    def start(self) -> None:
        self.alive = True

    async def stop(self, *, drain_seconds: float = 0.0) -> None:
        self.stops.append(drain_seconds)
        if self.gate is not None and not self.gate.is_set():
            self.aborting = True
            self.gate.set()

    def is_alive(self) -> bool:
        return self.alive

    def stands_still(self) -> float:
        return self.still

    def snapshot(self) -> Snapshot:
        return self.numbers

    async def ask(self, question: Callable[[Any], Any]) -> Any:
        raise EngineError("the double has no engine to ask")

    def transfer_report(self) -> TransferReport | None:
        return self.tiers

    async def set_tenants(self, tenants: Sequence[Tenant]) -> None:
        self.tenants.append({tenant.name: tenant for tenant in tenants})

    async def reset_prefix_cache(self) -> ResetReport:
        return ResetReport(freed_pages=7, busy_pages=2)

    async def submit(self, request: Request) -> Stream:
        if len(request.prompt_ids) >= self.max_len:
            raise InvalidRequestError(
                f"maximum context length is {self.max_len} tokens, got {len(request.prompt_ids)}",
                param="prompt",
                code="context_length_exceeded",
            )
        if sum(not (s.closed.is_set() or s.finished) for s in self.streams) >= self.max_queue:
            raise QueueFullError(self.max_queue)
        stream = Stream(request, self._run(request))
        self.streams.append(stream)
        self.arrived.set()
        return stream

    @property
    def last(self) -> Request:
        return self.streams[-1].request

    async def _run(self, request: Request) -> AsyncIterator[RequestOutput]:
        params, prompt = request.params, list(request.prompt_ids)
        texts = [self.texts[i % len(self.texts)].encode() for i in range(params.n)]
        limit = 10**6 if params.max_tokens is None else params.max_tokens
        whole = [text[:limit] for text in texts]
        made, step = 0, 0
        ended: set[int] = set()
        while len(ended) < params.n:
            if self.gate is not None and step >= self.free_steps:
                await self.gate.wait()
            if self.aborting:
                aborted = [ChoiceDelta(i, finish_reason="abort") for i in range(params.n) if i not in ended]
                yield RequestOutput(request.request_id, aborted, len(prompt), self.cached, made, None, True)
                return
            if step == self.fail_after:
                raise self.failure
            deltas = []
            for i, ids in enumerate(whole):
                if i in ended:
                    continue
                piece = ids[step * self.chunk : (step + 1) * self.chunk]
                made += len(piece)
                done = (step + 1) * self.chunk >= len(ids)
                reason = ("length" if len(ids) == limit else "stop") if done else None
                if done:
                    ended.add(i)
                deltas.append(ChoiceDelta(i, piece.decode(), list(piece), _logprobs(params.logprobs, piece), reason))
            prompt_logprobs = None
            if params.prompt_logprobs is not None and step == 0:
                prompt_logprobs = [None, *_logprobs(params.prompt_logprobs, prompt[1:])]
            yield RequestOutput(
                request.request_id, deltas, len(prompt), self.cached, made, prompt_logprobs, len(ended) == params.n
            )
            step += 1
            await asyncio.sleep(0)


def _logprobs(count: int | None, ids: Sequence[int]) -> list[TokenLogprob]:
    if count is None:
        return []
    return [TokenLogprob(i, -0.5, tuple((t, -0.5 - k) for k, t in enumerate((i, 33, 34)[:count]))) for i in ids]
