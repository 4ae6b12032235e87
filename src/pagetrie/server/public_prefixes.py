"""/v1/admin/public_prefixes, and the file of them: what the operator lets all tenants share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from pagetrie.engine.engine import Engine
from pagetrie.engine.public import PublicPrefix
from pagetrie.engine.tenant import Owner, Tenant
from pagetrie.errors import PagetrieError
from pagetrie.server.context import ServerContext, read_json_body
from pagetrie.server.disconnect import unless_disconnected
from pagetrie.server.lines_file import read_lines
from pagetrie.server.prompts import kept_prompt
from pagetrie.server.protocol import PublicPrefixRequest
from pagetrie.server.text_api import ChatTemplateLike, TokenizerLike
from pagetrie.server.warm import prefill

logger = logging.getLogger("pagetrie.server")


def read_public_prefixes(path: Path, tokenizer: TokenizerLike, template: ChatTemplateLike | None) -> list[list[int]]:
    """The token ids of each line of a JSONL file; empty lines are left out.

    Raises:
        ConfigError: the file can't be read, or a line makes no sense; says which.
    """
    return read_lines(
        path, "public prefixes", lambda _, line: kept_prompt(PublicPrefixRequest.parse(line), tokenizer, template)
    )


async def declare_all(context: ServerContext, prefixes: Sequence[list[int]]) -> None:
    """Make prefixes public and compute them. What fails is logged and doesn't keep the server from starting."""
    for number, ids in enumerate(prefixes, 1):
        try:
            await declare(context, ids)
        except PagetrieError as error:
            logger.warning("public prefix %d: %s", number, error)


async def declare(context: ServerContext, ids: list[int]) -> PublicPrefix:
    """Make a prefix public, compute it and keep it. Raises PagetrieError; the prefix may be public all the same."""

    def begin(engine: Engine) -> tuple[PublicPrefix, list[int], bytes]:
        prefix = engine.public.declare(ids)
        return prefix, engine.public.prompt(prefix), engine.config.public_salt

    prefix, prompt, salt = await context.loop.ask(begin)
    await prefill(context, f"public-{context.new_id()}", prompt, Owner(Tenant(salt=salt), server=True))
    await context.loop.ask(lambda engine: engine.public.secure(prefix))
    return prefix


async def create(context: ServerContext, http: HttpRequest) -> Response:
    """Make a prompt or messages public; answered once they are computed."""
    body = await read_json_body(http)
    context.check_available()

    def prepare() -> list[int]:
        request = PublicPrefixRequest.parse(body)
        context.check_model(request.model)
        return kept_prompt(request, context.tokenizer, context.chat_template)

    ids = await context.workers.run(len(body), prepare)
    prefix = await unless_disconnected(http.receive, declare(context, ids))
    return JSONResponse(await context.loop.ask(lambda _: _describe(prefix)))


async def show_all(context: ServerContext) -> Response:
    """What is public, in the order in which it was declared."""
    context.check_available()
    described = await context.loop.ask(lambda engine: [_describe(prefix) for prefix in engine.public])
    return JSONResponse({"object": "list", "data": described})


async def delete(context: ServerContext, name: str) -> Response:
    """Share a prefix no more."""
    context.check_available()
    await context.loop.ask(lambda engine: engine.public.withdraw(name))
    return JSONResponse({"id": name, "object": "public_prefix", "deleted": True})


def _describe(prefix: PublicPrefix) -> dict[str, Any]:
    return {
        "id": prefix.id,
        "object": "public_prefix",
        "tokens": len(prefix.ids),
        "shared_pages": prefix.pages,
        "held_tokens": prefix.held_tokens,
    }
