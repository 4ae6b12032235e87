"""Prompts that are computed before the server is ready, so that the first users find them cached; some are pinned."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagetrie.engine.contexts import Context
from pagetrie.engine.engine import Engine
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import ContextUse, Request
from pagetrie.errors import ConfigError, HoldLimitError, InvalidRequestError, PagetrieError
from pagetrie.server.collect import collect
from pagetrie.server.context import ServerContext
from pagetrie.server.prompts import Prompt, chat_messages, chat_tools, one_prompt, template_variables
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
        salt: whose it is, as ``cache_salt``.
        pin: keep it from eviction, for ``ttl`` seconds.
    """

    line: int
    ids: list[int]
    salt: str
    pin: bool
    ttl: float


def read_warm_file(
    path: Path, tokenizer: TokenizerLike, template: ChatTemplateLike | None, validate: Callable[[Request], None]
) -> list[WarmPrompt]:
    """The prompts of a JSONL file; empty lines are left out.

    Args:
        path: one JSON object per line, see "Warm-up" in ``docs/api.md``.
        tokenizer, template: the model's.
        validate: raises InvalidRequestError for what the engine can never serve.

    Raises:
        ConfigError: the file can't be read, or a line makes no sense; says which.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"can't read the warm-up file {path}: {error.strerror}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(number, line, tokenizer, template, validate))
        except InvalidRequestError as error:
            raise ConfigError(f"line {number} of the warm-up file {path}: {error.message}") from error
    return prompts


def _prompt(
    number: int,
    line: bytes,
    tokenizer: TokenizerLike,
    template: ChatTemplateLike | None,
    validate: Callable[[Request], None],
) -> WarmPrompt:
    fields = WarmPromptFields.parse(line)
    if fields.messages is None:
        ids = one_prompt(fields.prompt, tokenizer, fields.add_special_tokens is not False)
    elif template is None:
        raise InvalidRequestError("this model has no chat template; use 'prompt'", param="messages")
    else:
        text = template.render(
            chat_messages(fields.messages),
            chat_tools(fields.tools),
            add_generation_prompt=False,
            **template_variables(fields),
        )
        ids = tokenizer.encode(text, add_special=False)
    validate(Request(f"warm-{number}", ids, PREFILL))
    return WarmPrompt(
        number, ids, fields.cache_salt or "", bool(fields.pin), math.inf if fields.ttl is None else fields.ttl
    )


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
        made = await context.loop.ask(
            lambda engine: engine.contexts.create(None, prompt.ids, salt=prompt.salt, ttl=prompt.ttl)
        )
        use = ContextUse(made.id, None)
    outputs = await context.submit(f"warm-{prompt.line}", [Prompt(prompt.ids, "")], PREFILL, prompt.salt, use)
    try:
        await collect(outputs, 1)
    finally:
        await outputs.aclose()
    if made is not None:
        await context.loop.ask(lambda engine: _pin(engine, made))


def _pin(engine: Engine, made: Context) -> None:
    try:
        engine.contexts.secure(made)
    except HoldLimitError:
        engine.contexts.delete(None, made.id)
        raise
