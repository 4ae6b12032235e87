"""Request fields the server knows but doesn't act on. A field that is in no list and in no model is refused.

One place, so that the documentation and the code can't drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagetrie.errors import InvalidRequestError

IGNORED_FIELDS: Mapping[str, str] = {
    "user": "names the end user; changes nothing about the answer",
    "safety_identifier": "names the end user; changes nothing about the answer",
    "metadata": "labels for OpenAI's stored completions; nothing is stored here",
    "store": "nothing is stored; every answer is as with false",
    "service_tier": "there is one tier",
    "prompt_cache_key": "a routing hint; one process is one cache, and prefixes are found by their tokens",
    "prompt_cache_retention": "entries live until their pages are needed",
    "prompt_cache_options": "caching is always implicit",
    "parallel_tool_calls": "tool calls are left in the text",
    "spaces_between_special_tokens": "special tokens are written as the tokenizer has them",
}
"""Accepted with any value and without effect, each with the reason why that is honest."""

UNSUPPORTED_FIELDS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "suffix": ("inserting text before a suffix is not supported", ("",)),
    "functions": ("use tools", ([],)),
    "function_call": ("use tools", ("none", "auto")),
    "audio": ("only text is served", ()),
    "modalities": ("only text is served", (["text"],)),
    "prediction": ("predicted outputs are not supported", ()),
    "reasoning_effort": ("the effort of reasoning can't be set", ("none",)),
    "verbosity": ("verbosity can't be set", ("medium",)),
    "web_search_options": ("there is no web search", ()),
    "moderation": ("there is no moderation", ()),
    "prompt_logprobs": ("use echo with logprobs in /v1/completions", ()),
    "include_stop_str_in_output": ("stop strings are never part of the text", (False,)),
    "truncate_prompt_tokens": ("prompts are never cut", ()),
    "allowed_token_ids": ("use logit_bias", ()),
    "bad_words": ("use logit_bias", ([],)),
    "chat_template": ("a template can't come with the request", ()),
    "documents": ("pass them in chat_template_kwargs if the template knows them", ([],)),
    "mm_processor_kwargs": ("only text is served", ()),
    "guided_json": ("constrained output is not supported", ()),
    "guided_regex": ("constrained output is not supported", ()),
    "guided_choice": ("constrained output is not supported", ()),
    "guided_grammar": ("constrained output is not supported", ()),
    "structured_outputs": ("constrained output is not supported", ()),
    "lora": ("adapters are not supported", ([],)),
}
"""Known from OpenAI's or vLLM's interface but not served: name -> (reason, values that ask for nothing).

null, or one of these values, is accepted; any other is refused with the reason.
"""


def check_extra_fields(extra: Mapping[str, Any] | None) -> None:
    """Refuse whatever is neither documented as ignored nor a neutral value of an unsupported field.

    Raises:
        InvalidRequestError: naming the field in ``param``.
    """
    for name, value in (extra or {}).items():
        if name in IGNORED_FIELDS:
            continue
        if name in UNSUPPORTED_FIELDS:
            reason, neutral = UNSUPPORTED_FIELDS[name]
            if value is None or any(type(value) is type(n) and value == n for n in neutral):
                continue
            raise InvalidRequestError(
                f"Unsupported parameter: '{name}': {reason}.", param=name, code="unsupported_parameter"
            )
        shown = name if len(name) <= 80 else name[:80] + "..."
        raise InvalidRequestError(f"Unknown parameter: '{shown}'.", param=shown, code="unknown_parameter")
