"""The HTTP application: OpenAI's interface, the helpers around it and how errors are answered."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from asyncio import sleep as pause
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from pagetrie import __version__
from pagetrie.engine.live import LiveView
from pagetrie.engine.tenant import Tenant
from pagetrie.engine.timeline import Timeline
from pagetrie.errors import EngineError, PagetrieError
from pagetrie.server import chat, completions, contexts, explain, health, openapi, public_prefixes, tokenization
from pagetrie.server.auth import Access, Authentication
from pagetrie.server.context import HttpError, ServerContext
from pagetrie.server.dashboard import check_local, serve_file
from pagetrie.server.disconnect import ClientGoneError, cancel_and_wait
from pagetrie.server.engine_api import Engine
from pagetrie.server.errors import http_error, is_expected, model_not_found, to_api_error
from pagetrie.server.exchange import Exchange, Exchanges, logger, plain_log
from pagetrie.server.live import LiveFeed
from pagetrie.server.logprobs import TokenNames
from pagetrie.server.metrics import Metrics
from pagetrie.server.middleware import BodyLimit
from pagetrie.server.public_prefixes import declare_all
from pagetrie.server.quota import Quotas
from pagetrie.server.text_api import ChatTemplateLike, TokenizerLike
from pagetrie.server.warm import WarmPrompt, warm_up
from pagetrie.server.workers import WorkerPool

DEFAULT_MAX_BODY_BYTES = 8 * 2**20
CLIENT_CLOSED_REQUEST = 499
LOOK_SECONDS = 5.0
"""Between looks at the keys file while nobody asks; with every request it is looked at anyhow."""


def create_app(
    *,
    loop: Engine,
    tokenizer: TokenizerLike,
    chat_template: ChatTemplateLike | None,
    model_name: str,
    max_model_len: int,
    metrics: Metrics,
    timeline: Timeline | None = None,
    aliases: Sequence[str] = (),
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    prepare_threads: int = 4,
    system_fingerprint: str | None = None,
    context_ttl: float = 600.0,
    stuck_after: float = 60.0,
    warm: Sequence[WarmPrompt] = (),
    public: Sequence[list[int]] = (),
    access: Access | None = None,
    quotas: Quotas | None = None,
    access_log: Callable[[Exchange], None] | None = plain_log,
    trace_headers: Collection[str] = (),
    clock: Callable[[], float] = time.time,
    new_id: Callable[[], str] = lambda: secrets.token_hex(16),
) -> FastAPI:
    """Build the application around one engine. Several may live in a process.

    The engine is started when the application starts up (ASGI lifespan) and stopped when it shuts down.

    Args:
        loop: the engine on its thread.
        tokenizer, chat_template: the model's; without a template chat is refused.
        model_name: the name that /v1/models shows; requests may also use ``aliases`` or leave the name out.
        max_model_len: the context limit in tokens, as told by /v1/models and /tokenize.
        metrics, timeline: must also be among the engine's observers to show anything.
        max_body_bytes: larger request bodies get 413.
        prepare_threads: threads that parse, render and tokenise ordinary requests.
        system_fingerprint: told in every answer.
        warm: prompts to compute before the application is ready.
        public: token ids of prefixes that all tenants share; computed before that too.
        context_ttl: seconds that a context lives after its last use unless it asks for another number.
        stuck_after: seconds without a step, while there is work, from which /ready says no.
        access: who may call; if None, anybody, as the one local tenant.
        quotas: what tenants have used of their limits.
        access_log: told of every request that was answered.
        trace_headers: names of headers that requests carry on to the engine's observers.
        clock: seconds since the epoch, for ``created``.
        new_id: the random part of request ids.
    """
    context = ServerContext(
        loop=loop,
        tokenizer=tokenizer,
        chat_template=chat_template,
        model_name=model_name,
        aliases=tuple(aliases),
        max_model_len=max_model_len,
        created=int(clock()),
        metrics=metrics,
        version=__version__,
        system_fingerprint=system_fingerprint,
        clock=clock,
        new_id=new_id,
        workers=WorkerPool(prepare_threads),
        names=TokenNames(tokenizer),
        context_ttl=context_ttl,
        quotas=quotas or Quotas(),
        stuck_after=stuck_after,
        trace_headers=trace_headers,
    )
    if access is not None:
        metrics.registry.register(context.quotas)
    metrics.bind(loop.snapshot, loop.transfer_report)
    callers = access or Access()

    async def on_tenants(tenants: list[Tenant]) -> None:
        with contextlib.suppress(EngineError):  # going down
            await loop.set_tenants(tenants)

    async def watch_keys() -> None:
        while True:
            await pause(LOOK_SECONDS)
            callers.refresh()
            await callers.tell(on_tenants)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        loop.start()
        watching = None
        try:
            await callers.tell(on_tenants)
            await declare_all(context, public)
            await warm_up(context, warm)
            if access is not None:
                watching = asyncio.create_task(watch_keys())
            yield
        finally:
            if watching is not None:
                await cancel_and_wait(watching)
            context.stopping = True
            await loop.stop()
            context.workers.close()

    app = FastAPI(title="pagetrie", version=context.version, lifespan=lifespan, openapi_url=None)
    app.state.context = context
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(Authentication, access=callers, listener=on_tenants)
    app.add_middleware(Exchanges, listeners=[metrics.on_exchange, *([] if access_log is None else [access_log])])
    _add_error_handlers(app)
    _add_generation_routes(app, context)
    _add_context_routes(app, context)
    _add_admin_routes(app, context)
    app.state.live = LiveFeed(context, LiveView(timeline or Timeline()), callers)
    _add_live_routes(app, app.state.live, keys=access is not None)
    _add_service_routes(app, context, callers)
    _add_description(app, context, keys=access is not None)
    return app


def _add_generation_routes(app: FastAPI, context: ServerContext) -> None:
    @app.post("/v1/chat/completions")
    async def chat_route(request: Request) -> Response:
        return await chat.chat_completions(context, request)

    @app.post("/v1/completions")
    async def completions_route(request: Request) -> Response:
        return await completions.completions(context, request)

    @app.get("/v1/requests/{request_id}/cache")
    async def request_cache(request: Request, request_id: str) -> Response:
        return await explain.show(context, request, request_id)

    @app.post("/tokenize")
    async def tokenize_route(request: Request) -> Response:
        return await tokenization.tokenize(context, request)

    @app.post("/detokenize")
    async def detokenize_route(request: Request) -> Response:
        return await tokenization.detokenize(context, request)


def _add_context_routes(app: FastAPI, context: ServerContext) -> None:
    @app.post("/v1/contexts")
    async def create(request: Request) -> Response:
        return await contexts.create(context, request)

    @app.get("/v1/contexts")
    async def show_all(request: Request) -> Response:
        return await contexts.show_all(context, request)

    @app.get("/v1/contexts/{context_id}")
    async def show(request: Request, context_id: str) -> Response:
        return await contexts.show(context, request, context_id)

    @app.delete("/v1/contexts/{context_id}")
    async def delete(request: Request, context_id: str) -> Response:
        return await contexts.delete(context, request, context_id)

    @app.post("/v1/contexts/{context_id}/fork")
    async def fork(request: Request, context_id: str) -> Response:
        return await contexts.fork(context, request, context_id)

    @app.post("/v1/contexts/{context_id}/append")
    async def append(request: Request, context_id: str) -> Response:
        return await contexts.append(context, request, context_id)


def _add_admin_routes(app: FastAPI, context: ServerContext) -> None:
    @app.post("/v1/admin/public_prefixes")
    async def create(request: Request) -> Response:
        return await public_prefixes.create(context, request)

    @app.get("/v1/admin/public_prefixes")
    async def show_all() -> Response:
        return await public_prefixes.show_all(context)

    @app.delete("/v1/admin/public_prefixes/{name}")
    async def delete(name: str) -> Response:
        return await public_prefixes.delete(context, name)


def _add_live_routes(app: FastAPI, feed: LiveFeed, *, keys: bool) -> None:
    guards = [] if keys else [Depends(check_local)]

    @app.get("/dashboard", dependencies=guards)
    @app.get("/dashboard/{name}", dependencies=guards)
    async def page(name: str = "") -> Response:
        return serve_file(name)

    @app.get("/v1/admin/live", dependencies=guards)
    async def live(request: Request) -> Response:
        return await feed.show(request)

    @app.get("/v1/admin/live/events", dependencies=guards)
    async def live_events(request: Request) -> Response:
        return await feed.watch(request)

    @app.get("/v1/admin/find", dependencies=guards)
    async def find(request: Request) -> Response:
        return await feed.find(request)


def _add_service_routes(app: FastAPI, context: ServerContext, callers: Access) -> None:
    def model_card(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": context.created,
            "owned_by": "pagetrie",
            "root": context.model_name,
            "parent": None,
            "max_model_len": context.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        names = [context.model_name, *context.aliases]
        return JSONResponse({"object": "list", "data": [model_card(name) for name in names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name not in (context.model_name, *context.aliases):
            raise model_not_found(name)
        return JSONResponse(model_card(name))

    @app.get("/health")
    async def show_health() -> Response:
        """Whether the engine lives: 200, or 503 with the reason."""
        return health.health(context)

    @app.get("/ready")
    async def show_readiness() -> Response:
        """Whether to send requests here: 200 (ready, or degraded with reasons), or 503 with reasons."""
        return health.ready(context)

    @app.get("/metrics")
    async def metrics() -> Response:
        usage = await context.usage()
        if usage is not None:
            context.quotas.note_pages(usage.owners, callers.tenants())
        return Response(context.metrics.expose(usage), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def show_version() -> Response:
        return JSONResponse({"version": context.version})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """Forget all stored prefixes. ``busy_pages`` stay with running requests, but nobody hits them any more."""
        context.check_available()
        report = await context.loop.reset_prefix_cache()
        return JSONResponse({"freed_pages": report.freed_pages, "busy_pages": report.busy_pages})


def _add_description(app: FastAPI, context: ServerContext, *, keys: bool) -> None:
    described = openapi.describe(app.routes, context.version, keys=keys)

    @app.get("/openapi.json")
    async def description() -> Response:
        return JSONResponse(described)


def _add_error_handlers(app: FastAPI) -> None:
    async def on_pagetrie_error(_: Request, error: Exception) -> Response:
        if not is_expected(error):
            logger.error("a request failed", exc_info=error)
        return to_api_error(error).response()

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        detail = str(error.detail)
        if error.status_code == 404:
            detail = f"Unknown request URL: {request.method} {request.url.path[:200]}."
        elif error.status_code == 405:
            detail = f"Not allowed: {request.method} on {request.url.path[:200]}."
        return http_error(error.status_code, detail, dict(error.headers or {})).response()

    async def on_http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HttpError)
        return error.error.response()

    async def on_client_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        PagetrieError: on_pagetrie_error,
        HTTPException: on_http_exception,
        HttpError: on_http_error,
        ClientGoneError: on_client_gone,
        ClientDisconnect: on_client_gone,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
