"""What the handlers of one app share. Nothing here is process-wide."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest

from pagetrie.engine.engine import Engine as CoreEngine
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import ContextUse, Request
from pagetrie.engine.usage import CacheUsage
from pagetrie.errors import EngineError, InvalidRequestError
from pagetrie.kv import RequestKind
from pagetrie.server import exchange as exchanges
from pagetrie.server.auth import Caller, caller
from pagetrie.server.engine_api import Engine, Source
from pagetrie.server.errors import ServerStoppingError, http_error, model_not_found
from pagetrie.server.fanin import OutputStream
from pagetrie.server.logprobs import TokenNames
from pagetrie.server.metrics import Metrics
from pagetrie.server.prompts import Prompt
from pagetrie.server.quota import Quotas
from pagetrie.server.text_api import ChatTemplateLike, TokenizerLike
from pagetrie.server.workers import WorkerPool

USAGE_SECONDS = 2.0


class HttpError(Exception):
    """A transport-level refusal with its HTTP status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.error = http_error(status, detail)


@dataclass(slots=True)
class ServerContext:
    """One app's parts and settings."""

    loop: Engine
    tokenizer: TokenizerLike
    chat_template: ChatTemplateLike | None
    model_name: str
    aliases: Sequence[str]
    max_model_len: int
    created: int
    metrics: Metrics
    version: str
    system_fingerprint: str | None
    clock: Callable[[], float]
    new_id: Callable[[], str]
    workers: WorkerPool
    names: TokenNames
    context_ttl: float
    quotas: Quotas
    stuck_after: float
    trace_headers: Collection[str]
    stopping: bool = False

    def check_available(self) -> None:
        """Refuse work while going down or after the engine's death.

        Raises:
            ServerStoppingError, EngineError
        """
        if self.stopping:
            raise ServerStoppingError
        if not self.loop.is_alive():
            raise EngineError("the engine is not running")

    def caller(self, http: HttpRequest) -> Caller:
        """Who asks for work, if the server takes any and the caller is within its limits.

        Raises:
            ServerStoppingError, EngineError, RateLimitError
        """
        self.check_available()
        asking = caller(http)
        self.quotas.check(asking)
        return asking

    def check_model(self, name: str | None) -> str:
        """The name to answer under: the one asked for, or the model's own.

        Raises:
            InvalidRequestError: 404, no model of that name.
        """
        if name is None:
            return self.model_name
        if name != self.model_name and name not in self.aliases:
            raise model_not_found(name)
        return name

    def template(self) -> ChatTemplateLike:
        """The chat template.

        Raises:
            InvalidRequestError: the model has none.
        """
        if self.chat_template is None:
            raise InvalidRequestError("This model has no chat template; use /v1/completions.", param="messages")
        return self.chat_template

    async def submit(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        caller: Caller,
        salt: str | None,
        use: ContextUse | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        kind: RequestKind = RequestKind.UNKNOWN,
    ) -> OutputStream:
        """Queue all prompts of an API request, or none. ``use`` is the context that its one prompt starts from.

        Raises:
            RateLimitError: they would take the caller over its limits.
            InvalidRequestError, QueueFullError, EngineError: from the engine.
            ServerStoppingError: going down.
        """
        self.check_available()
        ticket = self.quotas.admit(caller, len(prompts), sum(len(prompt.ids) for prompt in prompts))
        sources: list[Source] = []
        exchange = exchanges.current()
        trace_headers = {} if exchange is None else exchange.some_headers(self.trace_headers)
        try:
            for i, prompt in enumerate(prompts):
                request = Request(
                    request_id=f"{request_id}-{i}",
                    prompt_ids=prompt.ids,
                    params=params,
                    tenant=caller.tenant,
                    namespace_salt=salt or "",
                    priority=priority,
                    timeout=timeout,
                    context=use,
                    trace_headers=trace_headers,
                    kind=kind if use is None else RequestKind.CONTEXT,
                )
                sources.append(await self.loop.submit(request))
        except BaseException:
            ticket.close()
            await asyncio.gather(*(source.aclose() for source in sources))
            raise
        outputs = OutputStream(sources, params.n, ticket)
        if exchange is not None:
            exchange.request_id = request_id
            exchange.outputs.append(outputs)
        return outputs

    async def usage(self) -> CacheUsage | None:
        """The memory's numbers of now; None if the engine doesn't get to it soon (a step may take a while)."""
        try:
            async with asyncio.timeout(USAGE_SECONDS):
                return await self.loop.ask(CoreEngine.usage)
        except (EngineError, TimeoutError):
            return None

    def head(self, kind: str, request_id: str, model: str) -> dict[str, Any]:
        """The fields that open every answer and chunk."""
        return {
            "id": request_id,
            "object": kind,
            "created": int(self.clock()),
            "model": model,
            "system_fingerprint": self.system_fingerprint,
        }


async def read_json_body(http: HttpRequest) -> bytes:
    """The body of a request that must be JSON.

    Raises:
        HttpError: 415 for any other content type. Without this check any web page could post forms here.
    """
    media = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        raise HttpError(415, f"The content type must be application/json, got '{media[:100]}'.")
    return await http.body()
