"""From request fields to token ids. Everything here may be slow and runs in a worker thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from pagetrie.errors import InvalidRequestError
from pagetrie.server.protocol import ChatFields, CreateRequest, PublicPrefixRequest, is_list_of, json_type
from pagetrie.server.text_api import ChatTemplateLike, TokenizerLike

MAX_PROMPTS = 1024
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
RESERVED_TEMPLATE_NAMES = ("self", "messages", "tools", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine. ``text`` is what ``echo`` gives back."""

    ids: list[int]
    text: str


def chat_prompt(request: ChatFields, template: ChatTemplateLike, tokenizer: TokenizerLike, add_special: bool) -> Prompt:
    """Render messages and tokenise them.

    Raises:
        InvalidRequestError: a message is malformed or the template refuses the conversation.
    """
    variables = template_variables(request)
    continue_final = bool(request.continue_final_message)
    generate = not continue_final if request.add_generation_prompt is None else request.add_generation_prompt
    text = template.render(
        chat_messages(request.messages),
        chat_tools(request.tools),
        add_generation_prompt=generate,
        continue_final_message=continue_final,
        **variables,
    )
    return Prompt(_not_empty(tokenizer.encode(text, add_special=add_special), "messages"), text)


def kept_prompt(
    fields: CreateRequest | PublicPrefixRequest, tokenizer: TokenizerLike, template: ChatTemplateLike | None
) -> list[int]:
    """The token ids of a prompt, or of messages that others will follow: what is warmed or shared.

    Raises:
        InvalidRequestError: a message is malformed, or the model has no template for it.
    """
    if fields.messages is None:
        return one_prompt(fields.prompt, tokenizer, fields.add_special_tokens is not False)
    if template is None:
        raise InvalidRequestError("this model has no chat template; use 'prompt'", param="messages")
    text = template.render(
        chat_messages(fields.messages),
        chat_tools(fields.tools),
        add_generation_prompt=False,
        **template_variables(fields),
    )
    return tokenizer.encode(text, add_special=False)


def completion_prompts(value: Any, tokenizer: TokenizerLike, add_special: bool, skip_special: bool) -> list[Prompt]:
    """The prompts of a completion request: a string, token ids, or a list of either.

    Raises:
        InvalidRequestError: wrong type, no prompt, an empty prompt, an id outside the vocabulary, too many prompts.
    """
    if value is None:
        raise InvalidRequestError("'prompt' is required.", param="prompt", code="missing_required_parameter")
    prompts = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequestError(f"At most {MAX_PROMPTS} prompts are allowed, got {len(prompts)}.", param="prompt")
    result = []
    for prompt in prompts:
        ids = _ids(
            prompt,
            tokenizer,
            add_special,
            "a string, an array of strings, an array of token ids or an array of such arrays",
        )
        text = prompt if isinstance(prompt, str) else tokenizer.decode(ids, skip_special=skip_special)
        result.append(Prompt(_not_empty(ids, "prompt"), text))
    return result


def one_prompt(value: Any, tokenizer: TokenizerLike, add_special: bool) -> list[int]:
    """The tokens of one text, or one list of token ids; none of null.

    Raises:
        InvalidRequestError: another type, or an id outside the vocabulary.
    """
    return [] if value is None else _ids(value, tokenizer, add_special, "a string or an array of token ids")


def _ids(value: Any, tokenizer: TokenizerLike, add_special: bool, forms: str) -> list[int]:
    if isinstance(value, str):
        return tokenizer.encode(value, add_special=add_special)
    if not is_list_of(value, int):
        raise InvalidRequestError(f"'prompt' must be {forms}.", param="prompt", code="invalid_type")
    ids: list[int] = value
    tokenizer.check_ids(ids, param="prompt")
    return ids


def template_variables(request: ChatFields) -> dict[str, Any]:
    """What a request gives the template besides messages and tools.

    Raises:
        InvalidRequestError: a name that has a field of its own.
    """
    variables = request.chat_template_kwargs or {}
    for name in RESERVED_TEMPLATE_NAMES:
        if name in variables:
            raise InvalidRequestError(
                f"chat_template_kwargs can't hold '{name}'; give it as a field.", param="chat_template_kwargs"
            )
    return variables


def _not_empty(ids: list[int], param: str) -> list[int]:
    if not ids:
        raise InvalidRequestError(f"'{param}' is empty: at least one token is needed.", param=param)
    return ids


def chat_tools(value: Any) -> list[dict[str, Any]] | None:
    """Function schemas; None for none. Raises InvalidRequestError for anything but a list of objects."""
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise InvalidRequestError("'tools' must be an array of objects.", param="tools", code="invalid_type")
    return value


def chat_messages(value: Any) -> list[dict[str, Any]]:
    """Messages as templates expect them. Raises InvalidRequestError for what isn't a list of well-formed messages."""
    if not isinstance(value, list):
        code = "missing_required_parameter" if value is None else "invalid_type"
        raise InvalidRequestError("'messages' must be an array of messages.", param="messages", code=code)
    if not value:
        raise InvalidRequestError("'messages' must hold at least one message.", param="messages")
    return [_message(message, f"messages.{i}") for i, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message as templates expect it: text content, system for developer, tool arguments as objects."""
    if not isinstance(message, dict):
        raise InvalidRequestError(f"'{where}' must be an object.", param=where, code="invalid_type")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            f"'{where}.role' must be one of {', '.join(ROLES)}.", param=f"{where}.role", code="invalid_value"
        )
    result = dict(message)
    result["role"] = "system" if role == "developer" else role
    calls = message.get("tool_calls")
    if calls is None:
        result.pop("tool_calls", None)
    else:
        result["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    content = message.get("content")
    if content is None and not (role == "assistant" and (calls or message.get("function_call"))):
        raise InvalidRequestError(
            f"'{where}.content' is required.", param=f"{where}.content", code="missing_required_parameter"
        )
    result["content"] = "" if content is None else _content(content, f"{where}.content")
    return result


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    """Text as it is, or text parts for the template to join."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(
            f"'{where}' must be a string or an array of content parts, but is {json_type(content)}.",
            param=where,
            code="invalid_type",
        )
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part[kind] if kind in ("text", "refusal") and kind in part else None
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"'{where}.{i}' must be a part of type 'text' with a 'text' string; other kinds are not supported.",
                param=f"{where}.{i}",
                code="unsupported_value",
            )
        parts.append({"type": "text", "text": text})
    return parts


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequestError(f"'{where}' must be an array.", param=where, code="invalid_type")
    result = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                f"'{where}.{i}' must be an object with a 'function' that has a 'name'.",
                param=f"{where}.{i}",
                code="invalid_type",
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # The API carries arguments as a JSON string; templates write them with tojson.
            try:
                parsed = from_json(arguments) if arguments else {}
            except ValueError:
                parsed = arguments
            function = {**function, "arguments": parsed if isinstance(parsed, dict) else arguments}
        result.append({**call, "function": function})
    return result
