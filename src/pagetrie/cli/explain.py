"""``pagetrie explain A.json B.json``: what the second request would find in the cache of the first, and why no more."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagetrie.assembly import chat_template
from pagetrie.bundled import bundled_model_path
from pagetrie.errors import ConfigError, InvalidRequestError
from pagetrie.kv.tokens import common_prefix, pack_tokens
from pagetrie.models.loading import load_checkpoint
from pagetrie.server.prompts import chat_prompt, completion_prompts
from pagetrie.server.protocol import ChatRequest, CompletionRequest
from pagetrie.settings import Settings
from pagetrie.text.chat_template import ChatTemplate
from pagetrie.text.prompt_diff import Part, advice_on, describe_part
from pagetrie.text.tokenizer import Tokenizer

WINDOW = 256
BEFORE = 24
_OPENING = 16


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's body, read.

    Attributes:
        ids: its prompt.
        turns: its messages; none for a plain completion.
        salt: its ``cache_salt``.
        uses_cache: it doesn't say ``cache_prompt: false``.
    """

    ids: list[int]
    turns: list[dict[str, Any]]
    salt: str | None
    uses_cache: bool


def explain(settings: Settings, first: Path, second: Path) -> dict[str, Any]:
    """Compare two request bodies (chat or completion) as the server would see them, one after the other.

    Raises:
        ConfigError: a file can't be read, or isn't such a body.
        ModelLoadError: the model can't be used.
    """
    path = settings.model if settings.model is not None else bundled_model_path()
    tokenizer = load_checkpoint(path, settings.cache_dir).tokenizer()
    template = chat_template(settings, tokenizer) or ChatTemplate(None)
    return compare(_read(first, tokenizer, template), _read(second, tokenizer, template), tokenizer, settings.page_size)


def compare(first: Asked, second: Asked, tokenizer: Tokenizer, page_size: int) -> dict[str, Any]:
    """What ``second`` shares with ``first``, in tokens, and why no more."""
    shared = common_prefix(pack_tokens(first.ids), pack_tokens(second.ids), 0, 1 << 62) // 4
    part = Part(
        shared,
        second.ids[max(0, shared - BEFORE) : shared],
        second.ids[shared : shared + WINDOW],
        first.ids[shared : shared + WINDOW],
    )
    found: dict[str, Any] = {"first_tokens": len(first.ids), "second_tokens": len(second.ids), "common_tokens": shared}
    cacheable = min(shared, len(second.ids) - 1)
    advice: list[dict[str, str]] = []
    if not (first.uses_cache and second.uses_cache):
        reason, cacheable = "bypassed", 0
        which = "first" if not first.uses_cache else "second"
        text = f"The {which} request says cache_prompt: false, so it shares nothing; leave that out."
        advice.append({"code": "allow_the_cache", "text": text})
    elif first.salt != second.salt:
        reason, cacheable = "other_namespace", 0
        advice.append({"code": "use_the_same_salt", "text": "Requests share pages only with an equal cache_salt."})
    elif cacheable == len(second.ids) - 1:
        reason = "complete"
    elif shared == len(first.ids):
        reason = "never_stored"
    else:
        reason = "differs" if shared else "never_stored"
        # The second conversation goes on from the first, and yet doesn't begin with its prompt.
        turns = len(first.turns)
        goes_on = 0 < turns < len(second.turns) and second.turns[turns].get("role") == "assistant"
        near_the_end = len(first.ids) - shared <= _OPENING
        advice += advice_on(part, rewrites="the first request" if goes_on and near_the_end else "", surely=True)
    found |= {"cacheable_tokens": cacheable, "whole_pages": cacheable // page_size, "reason": reason}
    if part.here and part.stored:
        found["first_difference"] = describe_part(part, tokenizer)
    return {**found, "advice": advice}


def _read(path: Path, tokenizer: Tokenizer, template: ChatTemplate) -> Asked:
    try:
        body = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read the request {path}: {error.strerror}") from error
    try:
        request: ChatRequest | CompletionRequest
        if b'"messages"' in body and "messages" in json.loads(body):
            request = ChatRequest.parse(body)
            prompt = chat_prompt(request, template, tokenizer, bool(request.add_special_tokens))
            turns = request.messages
        else:
            request = CompletionRequest.parse(body)
            prompts = completion_prompts(request.prompt, tokenizer, request.add_special_tokens is not False, True)
            if len(prompts) > 1:
                raise InvalidRequestError(f"it has {len(prompts)} prompts; one is wanted", param="prompt")
            prompt, turns = prompts[0], []
    except (InvalidRequestError, ValueError) as error:
        raise ConfigError(f"{path} is no request body of a completion or a chat: {error}") from error
    return Asked(prompt.ids, turns, request.cache_salt, request.cache_prompt is not False)


def show(found: dict[str, Any]) -> str:
    """For people."""
    first, second = found["first_tokens"], found["second_tokens"]
    cached, pages = found["cacheable_tokens"], found["whole_pages"]
    lines = [
        f"The requests begin with {found['common_tokens']} equal tokens (of {first} and {second}).",
        f"After the first, the second finds {cached} tokens cached ({pages} whole pages): {found['reason']}.",
    ]
    difference = found.get("first_difference")
    if difference is not None:
        lines += [
            f"At token {difference['position']}, after {difference['before']!r},",
            f"  the first goes on  {difference['stored']['text']!r}",
            f"  the second goes on {difference['here']['text']!r}",
        ]
    lines += [advice["text"] for advice in found["advice"]]
    return "\n".join(lines)
