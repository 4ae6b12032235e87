"""Prompts that are computed before the server is ready, so that the first users find them cached; some are pinned."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagetrie.engine.contexts import Context
from pagetrie.engine.engine import Engine
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import ContextUse, Request
from pagetrie.engine.tenant import Owner, Tenant
from pagetrie.errors import HoldLimitError, InvalidRequestError, PagetrieError
from pagetrie.server.auth import Caller
from pagetrie.server.collect import collect
from pagetrie.server.context import ServerContext
from pagetrie.server.lines_file import read_lines
from pagetrie.server.prompts import Prompt, kept_prompt
from pagetrie.server.protocol import WarmPromptFields
from pagetrie.server.text_api import ChatTemplateLike, TokenizerLike

logger = logging.getLogger("pagetrie.server")

PREFILL = SamplingParams(max_tokens=0, temperature=0.0)


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """A prompt to compute.

    Attributes:
        line: where it stands in the file, from 1.
        ids: its tokens.
        owner: whose it is.
        pin: keep it from eviction, for ``ttl`` seconds.
    """

    line: int
    ids: list[int]
    owner: Owner
    pin: bool
    ttl: float


def read_warm_file(
    path: Path,
    tokenizer: TokenizerLike,
    template: ChatTemplateLike | None,
    validate: Callable[[Request], None],
    tenants: Mapping[str, Tenant],
) -> list[WarmPrompt]:
    """The prompts of a JSONL file; empty lines are left out.

    Args:
        path: one JSON object per line, see "Warm-up" in ``docs/api.md``.
        tokenizer, template: the model's.
        validate: raises InvalidRequestError for what the engine can never serve.
        tenants: all there are, by name; only the local one ("") where there are no keys.

    Raises:
        ConfigError: the file can't be read, or a line makes no sense; says which.
    """
    return read_lines(
        path, "warm-up file", lambda number, line: _prompt(number, line, tokenizer, template, validate, tenants)
    )


def _prompt(
    number: int,
    line: bytes,
    tokenizer: TokenizerLike,
    template: ChatTemplateLike | None,
    validate: Callable[[Request], None],
    tenants: Mapping[str, Tenant],
) -> WarmPrompt:
    fields = WarmPromptFields.parse(line)
    ids = kept_prompt(fields, tokenizer, template)
    tenant = tenants.get(fields.tenant or "")
    if tenant is None:
        known = "no API keys, so no tenants" if "" in tenants else f"tenants: {', '.join(tenants)}"
        raise InvalidRequestError(f"'tenant' must say whose prompt it is; there are {known}", param="tenant")
    validate(Request(f"warm-{number}", ids, PREFILL, tenant=tenant))
    owner = Owner(tenant, fields.cache_salt or "", server=True)
    return WarmPrompt(number, ids, owner, bool(fields.pin), math.inf if fields.ttl is None else fields.ttl)


async def warm_up(context: ServerContext, prompts: Sequence[WarmPrompt]) -> None:
    """Compute the prompts one after the other. What fails is logged and doesn't keep the server from starting."""
    for prompt in prompts:
        try:
            await _compute(context, prompt)
        except PagetrieError as error:
            logger.warning("line %d of the warm-up file: %s", prompt.line, error)


async def _compute(context: ServerContext, prompt: WarmPrompt) -> None:
    made, use = None, None
    if prompt.pin:
        made = await context.loop.ask(lambda engine: engine.contexts.create(prompt.owner, prompt.ids, ttl=prompt.ttl))
        use = ContextUse(made.id, prompt.owner)
    await prefill(context, f"warm-{prompt.line}", prompt.ids, prompt.owner, use)
    if made is not None:
        await context.loop.ask(lambda engine: _pin(engine, made))


async def prefill(
    context: ServerContext, request_id: str, ids: list[int], owner: Owner, use: ContextUse | None = None
) -> None:
    """Compute a prompt on the server's own account. Raises PagetrieError."""
    outputs = await context.submit(request_id, [Prompt(ids, "")], PREFILL, Caller(owner.tenant), owner.salt, use)
    try:
        await collect(outputs, 1)
    finally:
        await outputs.aclose()


def _pin(engine: Engine, made: Context) -> None:
    try:
        engine.contexts.secure(made)
    except HoldLimitError:
        engine.contexts.delete(made.owner, made.id)
        raise
