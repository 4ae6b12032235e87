"""/v1/contexts: prefixes that a client computes once, keeps, forks and goes on from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from pagetrie.engine.contexts import Context
from pagetrie.engine.engine import Engine
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import ContextUse
from pagetrie.engine.tenant import Owner
from pagetrie.errors import InvalidRequestError, PagetrieError
from pagetrie.server.auth import Caller, caller
from pagetrie.server.collect import collect
from pagetrie.server.context import ServerContext, read_json_body
from pagetrie.server.disconnect import unless_disconnected
from pagetrie.server.prompts import Prompt, chat_messages, chat_tools, one_prompt, template_variables
from pagetrie.server.protocol import AppendRequest, ChatRequest, CompletionRequest, CreateRequest, ForkRequest
from pagetrie.text.transcript import Transcript

PREFILL = SamplingParams(max_tokens=0, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Start:
    """What a request on a context begins with."""

    prompt: Prompt
    use: ContextUse


# -- routes -----------------------------------------------------------------------------------------------------------


async def create(context: ServerContext, http: HttpRequest) -> Response:
    """Compute a prompt or messages and keep them."""
    caller = context.caller(http)
    body = await read_json_body(http)
    return await unless_disconnected(http.receive, _create(context, caller, body))


async def append(context: ServerContext, http: HttpRequest, context_id: str) -> Response:
    """Compute more of a context."""
    caller = context.caller(http)
    body = await read_json_body(http)
    return await unless_disconnected(http.receive, _append(context, caller, body, context_id))


async def fork(context: ServerContext, http: HttpRequest, context_id: str) -> Response:
    """Contexts that stand where this one stands."""
    request = ForkRequest.parse(await read_json_body(http))
    owner = caller(http).owner(request.cache_salt)

    def work(engine: Engine) -> list[dict[str, Any]]:
        forks = engine.contexts.fork(owner, context_id, 1 if request.n is None else request.n, ttl=request.ttl)
        return [_describe(engine, fork) for fork in forks]

    return _list(await _ask(context, work))


async def show(context: ServerContext, http: HttpRequest, context_id: str) -> Response:
    """One context; asking for it is a use of it."""
    owner = _owner(http)
    described = await _ask(context, lambda engine: _describe(engine, engine.contexts.get(owner, context_id)))
    return JSONResponse(described)


async def show_all(context: ServerContext, http: HttpRequest) -> Response:
    """An owner's contexts, oldest first."""
    owner = _owner(http)
    return _list(await _ask(context, lambda engine: [_describe(engine, c) for c in engine.contexts.of(owner)]))


async def delete(context: ServerContext, http: HttpRequest, context_id: str) -> Response:
    """End a context."""
    owner = _owner(http)
    await _ask(context, lambda engine: engine.contexts.delete(owner, context_id))
    return JSONResponse({"id": context_id, "object": "context", "deleted": True})


# -- generation on a context ------------------------------------------------------------------------------------------


async def start_chat(context: ServerContext, caller: Caller, request: ChatRequest) -> Start:
    """The prompt of a chat that goes on from a context: its messages, then the request's.

    Raises:
        InvalidRequestError: 404; 409 if another request appends to it; the context was made from a plain prompt.
    """
    ids, note, use = await _begin(context, request.context, caller.owner(request.cache_salt), bool(request.append))
    chat = _transcript(note, f"use /v1/completions on context '{use.id}'")
    variables = template_variables(request)
    if variables or chat_tools(request.tools):
        raise InvalidRequestError(
            "'tools' and 'chat_template_kwargs' are the context's; give them where it is made.", param="tools"
        )
    messages = [] if request.messages is None else chat_messages(request.messages)
    ids, chat = await context.workers.run(0, lambda: _extend(context, chat, ids, messages, answer=True))
    answers = request.max_tokens != 0 and request.max_completion_tokens != 0
    note_of = chat.answered if answers else lambda _: chat
    return Start(Prompt(ids, chat.text), replace(use, note=note_of))


async def start_completion(
    context: ServerContext, caller: Caller, request: CompletionRequest, skip_special: bool
) -> Start:
    """The prompt of a completion that goes on from a context: its tokens, then the request's prompt, if there is one.

    Raises:
        InvalidRequestError: 404; 409 if another request appends to it; several prompts.
    """
    ids, _, use = await _begin(context, request.context, caller.owner(request.cache_salt), bool(request.append))

    def prepare() -> Prompt:
        every = [*ids, *one_prompt(request.prompt, context.tokenizer, add_special=False)]
        return Prompt(every, context.tokenizer.decode(every, skip_special=skip_special) if request.echo else "")

    return Start(await context.workers.run(0, prepare), use)


async def _begin(
    context: ServerContext, context_id: str | None, owner: Owner, append: bool
) -> tuple[list[int], object, ContextUse]:
    assert context_id is not None

    def look(engine: Engine) -> tuple[list[int], object, ContextUse]:
        found = engine.contexts.get(owner, context_id)
        if append:
            engine.contexts.check_free(found, found.version)
        return found.ids, found.note, ContextUse(context_id, owner, append, found.version)

    looked: tuple[list[int], object, ContextUse] = await _ask(context, look)
    return looked


# -- the work ---------------------------------------------------------------------------------------------------------


async def _create(context: ServerContext, caller: Caller, body: bytes) -> Response:
    def prepare() -> tuple[CreateRequest, list[int], Transcript | None]:
        request = CreateRequest.parse(body)
        context.check_model(request.model)
        if request.messages is None:
            return request, one_prompt(request.prompt, context.tokenizer, request.add_special_tokens is not False), None
        chat = Transcript(tools=chat_tools(request.tools), variables=template_variables(request))
        ids, chat = _extend(context, chat, [], chat_messages(request.messages), answer=False)
        return request, ids, chat

    request, ids, chat = await context.workers.run(len(body), prepare)
    owner = caller.owner(request.cache_salt)
    ttl = context.context_ttl if request.ttl is None else request.ttl
    made = await _ask(context, lambda engine: engine.contexts.create(owner, ids, ttl=ttl, note=chat))
    try:
        usage = await _prefill(context, caller, Prompt(ids, ""), ContextUse(made.id, owner))
        described = await _ask(context, lambda engine: _secured(engine, made))
    except BaseException:
        with contextlib.suppress(PagetrieError):
            await context.loop.ask(lambda engine: engine.contexts.delete(owner, made.id))
        raise
    return JSONResponse({**described, "usage": usage})


async def _append(context: ServerContext, caller: Caller, body: bytes, context_id: str) -> Response:
    request = await context.workers.run(len(body), lambda: AppendRequest.parse(body))
    owner = caller.owner(request.cache_salt)
    ids, note, use = await _begin(context, context_id, owner, True)

    def prepare() -> tuple[list[int], Transcript | None]:
        if request.messages is None:
            return [*ids, *one_prompt(request.prompt, context.tokenizer, add_special=False)], None
        chat = _transcript(note, "append a 'prompt'")
        return _extend(context, chat, ids, chat_messages(request.messages), answer=False)

    ids, chat = await context.workers.run(len(body), prepare)
    use = replace(use, note=lambda _: chat)
    usage = await _prefill(context, caller, Prompt(ids, ""), use)
    described = await _ask(context, lambda engine: _describe(engine, engine.contexts.get(owner, context_id)))
    return JSONResponse({**described, "usage": usage})


async def _prefill(context: ServerContext, caller: Caller, prompt: Prompt, use: ContextUse) -> dict[str, object]:
    outputs = await context.submit(f"ctxreq-{context.new_id()}", [prompt], PREFILL, caller, use.owner.salt, use)
    try:
        await collect(outputs, 1)
        return outputs.usage()
    finally:
        await outputs.aclose()


def _extend(
    context: ServerContext, chat: Transcript, ids: list[int], messages: list[dict[str, Any]], *, answer: bool
) -> tuple[list[int], Transcript]:
    def encode(text: str) -> list[int]:
        return context.tokenizer.encode(text, add_special=False)

    return chat.extend(ids, messages, context.template().render, encode, answer=answer)


def _transcript(note: object, instead: str) -> Transcript:
    if not isinstance(note, Transcript):
        raise InvalidRequestError(
            f"This context holds a plain prompt, no messages; {instead}.", param="messages", code="invalid_value"
        )
    return note


def _secured(engine: Engine, made: Context) -> dict[str, Any]:
    engine.contexts.secure(made)
    return _describe(engine, made)


def _describe(engine: Engine, context: Context) -> dict[str, Any]:
    return {
        "id": context.id,
        "object": "context",
        "tokens": len(context.ids),
        "held_tokens": context.held_tokens,
        "pages": context.pages,
        "ttl": context.ttl,
        "expires_in": engine.contexts.seconds_left(context),
    }


async def _ask(context: ServerContext, question: Callable[[Engine], Any]) -> Any:
    context.check_available()
    return await context.loop.ask(question)


def _owner(http: HttpRequest) -> Owner:
    return caller(http).owner(http.query_params.get("cache_salt"))


def _list(described: list[dict[str, Any]]) -> Response:
    return JSONResponse({"object": "list", "data": described})
