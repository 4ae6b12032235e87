"""POST /tokenize and /detokenize, in vLLM's forms."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pagetrie.errors import InvalidRequestError
from pagetrie.server.context import ServerContext, read_json_body
from pagetrie.server.prompts import chat_prompt
from pagetrie.server.protocol import DetokenizeRequest, TokenizeRequest, is_list_of
from pagetrie.server.sse import encode


async def tokenize(context: ServerContext, http: HttpRequest) -> Response:
    """``{prompt | messages, ...}`` -> ``{count, max_model_len, tokens, token_strs}``."""
    body = await read_json_body(http)
    content = await context.workers.run(len(body), lambda: _tokenize(context, body))
    return Response(content, media_type="application/json")


async def detokenize(context: ServerContext, http: HttpRequest) -> Response:
    """``{tokens}`` -> ``{prompt}``, special tokens written out."""
    body = await read_json_body(http)
    content = await context.workers.run(len(body), lambda: _detokenize(context, body))
    return Response(content, media_type="application/json")


def _tokenize(context: ServerContext, body: bytes) -> bytes:
    request = TokenizeRequest.parse(body)
    context.check_model(request.model)
    if request.prompt is not None:
        ids = context.tokenizer.encode(request.prompt, add_special=request.add_special_tokens is not False)
    else:
        ids = chat_prompt(request, context.template(), context.tokenizer, bool(request.add_special_tokens)).ids
    strings = [context.tokenizer.token_text(i) or "" for i in ids] if request.return_token_strs else None
    return encode({"count": len(ids), "max_model_len": context.max_model_len, "tokens": ids, "token_strs": strings})


def _detokenize(context: ServerContext, body: bytes) -> bytes:
    request = DetokenizeRequest.parse(body)
    context.check_model(request.model)
    if not is_list_of(request.tokens, int):
        raise InvalidRequestError("'tokens' must be an array of token ids.", param="tokens", code="invalid_type")
    context.tokenizer.check_ids(request.tokens, param="tokens")
    return encode({"prompt": context.tokenizer.decode(request.tokens, skip_special=False)})
