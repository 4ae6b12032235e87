"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pagetrie.engine.params import SamplingParams
from pagetrie.kv import RequestKind
from pagetrie.server.auth import Caller
from pagetrie.server.collect import collect
from pagetrie.server.context import ServerContext, read_json_body
from pagetrie.server.contexts import start_chat
from pagetrie.server.disconnect import unless_disconnected
from pagetrie.server.explain import Explained
from pagetrie.server.fanin import OutputStream
from pagetrie.server.logprobs import chat_logprobs
from pagetrie.server.prompts import Prompt, chat_prompt
from pagetrie.server.protocol import ChatRequest
from pagetrie.server.sse import EventStream, encode, event


async def chat_completions(context: ServerContext, http: HttpRequest) -> Response:
    """Answer a conversation, whole or as a stream of chunks."""
    caller = context.caller(http)
    body = await read_json_body(http)
    request_id = f"chatcmpl-{context.new_id()}"
    return await unless_disconnected(http.receive, _answer(context, body, request_id, caller))


def _kind(messages: Sequence[Mapping[str, Any]]) -> RequestKind:
    """An agent's loop is known by the tool's result that it goes on from."""
    return RequestKind.TOOL if messages and messages[-1]["role"] == "tool" else RequestKind.CHAT


async def _answer(context: ServerContext, body: bytes, request_id: str, caller: Caller) -> Response:
    request, params, prompt, model = await context.workers.run(len(body), lambda: _prepare(context, body))
    use = None
    if prompt is None:
        start = await start_chat(context, caller, request)
        prompt, use = start.prompt, start.use
    outputs = await context.submit(
        request_id,
        [prompt],
        params,
        caller,
        request.cache_salt,
        use,
        priority=request.priority or 0,
        timeout=request.timeout,
        kind=_kind(request.messages),
    )
    explained = (
        Explained(context, request_id, outputs, caller.owner(request.cache_salt)) if request.explain_cache else None
    )
    if request.stream:
        head = context.head("chat.completion.chunk", request_id, model)
        with_logprobs = params.logprobs is not None
        events = _events(context, outputs, head, with_logprobs, request.include_usage)
        if explained is not None:
            events = explained.after(events, head)
        return EventStream(events, outputs.aclose, request_id)
    try:
        choices = await collect(outputs, params.n)
        usage = outputs.usage()
        extra = {} if explained is None else await explained.fields()
    finally:
        await outputs.aclose()
    head = context.head("chat.completion", request_id, model)

    def render() -> bytes:
        rendered = [
            {
                "index": i,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None if params.logprobs is None else chat_logprobs(context.names, choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for i, choice in enumerate(choices)
        ]
        return encode({**head, "choices": rendered, "usage": usage, **extra})

    content = render() if params.logprobs is None else await context.workers.run(0, render)
    return Response(content, media_type="application/json", headers={"x-request-id": request_id})


def _prepare(context: ServerContext, body: bytes) -> tuple[ChatRequest, SamplingParams, Prompt | None, str]:
    """No prompt yet if the request starts from a context."""
    request = ChatRequest.parse(body)
    model = context.check_model(request.model)
    params = request.sampling(context.tokenizer)
    if request.context is not None:
        return request, params, None, model
    prompt = chat_prompt(request, context.template(), context.tokenizer, bool(request.add_special_tokens))
    return request, params, prompt, model


async def _events(
    context: ServerContext, outputs: OutputStream, head: dict[str, Any], with_logprobs: bool, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Per choice: the role, its text in pieces, its end; then, if asked for, the usage."""
    no_usage = {"usage": None} if with_usage else {}
    opened: set[int] = set()

    def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event({**head, "choices": [choice], **no_usage})

    async for deltas in outputs:
        for delta in deltas:
            if delta.index not in opened:
                opened.add(delta.index)
                yield chunk(delta.index, {"role": "assistant", "content": "", "refusal": None})
            logprobs = chat_logprobs(context.names, delta.logprobs) if with_logprobs and delta.logprobs else None
            if delta.text or logprobs:
                yield chunk(delta.index, {"content": delta.text}, logprobs)
            if delta.finish_reason is not None:
                yield chunk(delta.index, {}, None, delta.finish_reason)
    if with_usage:
        yield event({**head, "choices": [], "usage": outputs.usage()})
