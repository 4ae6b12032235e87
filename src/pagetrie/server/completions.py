"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pagetrie.engine.params import SamplingParams
from pagetrie.kv import RequestKind
from pagetrie.server.auth import Caller
from pagetrie.server.collect import collect, likeliest
from pagetrie.server.context import ServerContext, read_json_body
from pagetrie.server.contexts import start_completion
from pagetrie.server.disconnect import unless_disconnected
from pagetrie.server.explain import Explained
from pagetrie.server.fanin import OutputStream
from pagetrie.server.logprobs import LegacyLogprobs, join_blocks
from pagetrie.server.prompts import Prompt, completion_prompts
from pagetrie.server.protocol import CompletionRequest
from pagetrie.server.sse import EventStream, encode, event


async def completions(context: ServerContext, http: HttpRequest) -> Response:
    """Complete one prompt or several; choice ``i`` of prompt ``p`` has index ``p * n + i``."""
    caller = context.caller(http)
    body = await read_json_body(http)
    request_id = f"cmpl-{context.new_id()}"
    return await unless_disconnected(http.receive, _answer(context, body, request_id, caller))


async def _answer(context: ServerContext, body: bytes, request_id: str, caller: Caller) -> Response:
    request, params, prompts, model = await context.workers.run(len(body), lambda: _prepare(context, body))
    use = None
    if request.context is not None:
        start = await start_completion(context, caller, request, params.skip_special_tokens)
        prompts, use = [start.prompt], start.use
    echo = _Echo(prompts, params.n) if request.echo else None
    # To rank choices, their log-probabilities are needed.
    drawn = params if request.drawn is None else replace(params, n=request.drawn, logprobs=params.logprobs or 0)
    outputs = await context.submit(
        request_id,
        prompts,
        drawn,
        caller,
        request.cache_salt,
        use,
        priority=request.priority or 0,
        timeout=request.timeout,
        kind=RequestKind.COMPLETION,
    )
    count = len(prompts) * params.n
    explained = (
        Explained(context, request_id, outputs, caller.owner(request.cache_salt)) if request.explain_cache else None
    )
    if request.stream:
        head = context.head("text_completion", request_id, model)
        events = _events(context, outputs, head, params, count, echo, request.include_usage)
        if explained is not None:
            events = explained.after(events, head)
        return EventStream(events, outputs.aclose, request_id)
    try:
        choices = likeliest(await collect(outputs, len(prompts) * drawn.n), drawn.n, params.n)
        usage = outputs.usage()
        extra = {} if explained is None else await explained.fields()
    finally:
        await outputs.aclose()
    head = context.head("text_completion", request_id, model)

    def render() -> bytes:
        rendered = []
        for i, choice in enumerate(choices):
            text, blocks, form = choice.text, [], _legacy(context, params)
            if echo is not None:
                prompt_text, block = echo.open(i, outputs, form)
                text = prompt_text + text
                blocks = [] if block is None else [block]
            if form is not None:
                blocks.append(form.output(choice.logprobs))
            logprobs = None if form is None else join_blocks(*blocks)
            rendered.append({"index": i, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason})
        return encode({**head, "choices": rendered, "usage": usage, **extra})

    content = render() if params.logprobs is None else await context.workers.run(0, render)
    return Response(content, media_type="application/json", headers={"x-request-id": request_id})


def _prepare(context: ServerContext, body: bytes) -> tuple[CompletionRequest, SamplingParams, list[Prompt], str]:
    """No prompts yet if the request starts from a context."""
    request = CompletionRequest.parse(body)
    model = context.check_model(request.model)
    params = request.sampling(context.tokenizer)
    if request.context is not None:
        return request, params, [], model
    add_special = request.add_special_tokens is not False
    prompts = completion_prompts(request.prompt, context.tokenizer, add_special, params.skip_special_tokens)
    return request, params, prompts, model


def _legacy(context: ServerContext, params: SamplingParams) -> LegacyLogprobs | None:
    if params.logprobs is None:
        return None
    return LegacyLogprobs(context.tokenizer, context.names, params.skip_special_tokens)


class _Echo:
    """Gives each choice its prompt back."""

    def __init__(self, prompts: list[Prompt], n: int) -> None:
        self._prompts = prompts
        self._n = n

    def open(self, index: int, outputs: OutputStream, form: LegacyLogprobs | None) -> tuple[str, dict[str, Any] | None]:
        """The prompt's text and, with log-probabilities, its block."""
        prompt = self._prompts[index // self._n]
        entries = outputs.prompts[index // self._n].logprobs
        if form is None or entries is None:
            return prompt.text, None
        return prompt.text, form.prompt(prompt.ids, entries, prompt.text)


def _first(
    chunk: Callable[[int, str, Any, str | None], bytes],
    echo: _Echo,
    index: int,
    outputs: OutputStream,
    form: LegacyLogprobs | None,
) -> bytes:
    text, block = echo.open(index, outputs, form)
    return chunk(index, text, block, None)


async def _events(
    context: ServerContext,
    outputs: OutputStream,
    head: dict[str, Any],
    params: SamplingParams,
    count: int,
    echo: _Echo | None,
    with_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """Text in pieces, the first with the echoed prompt, the last with the finish reason; then perhaps the usage."""
    no_usage = {"usage": None} if with_usage else {}
    forms = [_legacy(context, params) for _ in range(count)]
    opened: set[int] = set()

    def chunk(index: int, text: str, logprobs: Any, finish_reason: str | None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return event({**head, "choices": [choice], **no_usage})

    async for deltas in outputs:
        for delta in deltas:
            form = forms[delta.index]
            if echo is not None and delta.index not in opened:
                opened.add(delta.index)
                first = partial(_first, chunk, echo, delta.index, outputs, form)
                # A long prompt's log-probabilities take a while to write.
                yield first() if form is None else await context.workers.run(0, first)
            logprobs = form.output(delta.logprobs) if form is not None and delta.logprobs else None
            if delta.text or logprobs or delta.finish_reason is not None:
                yield chunk(delta.index, delta.text, logprobs, delta.finish_reason)
    if with_usage:
        yield event({**head, "choices": [], "usage": outputs.usage()})
