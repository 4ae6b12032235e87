"""Chat templates: from messages to the text that a model expects.

Templates run as `transformers` runs them (jinja2's immutable sandbox, the same whitespace rules, filters, functions),
so a model's own template gives the text it was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagetrie.errors import InvalidRequestError, ModelLoadError
from pagetrie.text.tokenizer import Tokenizer

_MARK = "\ue000end of the message to continue\ue000"


class _Generation(Extension):
    """``{% generation %}`` marks what an assistant said, for training; here it only lets its body through."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template. Safe to use from several threads.

    The text it gives holds its own special tokens (a BOS too, if the model wants one), so it is to be encoded with
    ``add_special=False``.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile a template; None stands for a model without one.

        ``now`` gives the local time to templates that write a date. Raises ModelLoadError for a template with a syntax
        error.
        """
        self._names = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._template: jinja2.Template | None = None
        self._takes_parts = False
        if source is None:
            return
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self._takes_parts = _reads_parts(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            # Not str(error): that spans several lines.
            raise ModelLoadError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}"
            ) from error

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, source: str | None = None, *, now: Callable[[], datetime] = datetime.now
    ) -> ChatTemplate:
        """The model's own template, or ``source`` in its place."""
        return cls(
            tokenizer.chat_template if source is None else source,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            now=now,
        )

    def __bool__(self) -> bool:
        """Whether there is a template."""
        return self._template is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: role, content (a string, or a list of text parts) and whatever else the template reads.
            tools: function schemas in OpenAI's form.
            add_generation_prompt: end with the opening of an assistant message.
            continue_final_message: end inside the last message, for the model to go on with it.
            kwargs: further variables of the template (``enable_thinking``, ...).

        Raises:
            InvalidRequestError: the model has no template, or the template can't render this conversation.
        """
        if self._template is None:
            raise _refusal("this model has no chat template; use the completions API, or give the server a template")
        if continue_final_message and add_generation_prompt:
            raise _refusal("continue_final_message and add_generation_prompt exclude each other")
        prepared = [self._prepared(message) for message in messages]
        if continue_final_message:
            _mark_end(prepared)
        try:
            text = self._template.render(
                **{**self._names, "documents": None, **kwargs},
                messages=prepared,
                tools=None if tools is None else list(tools),
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:
            # Whatever a template does wrong with a conversation, the conversation is what can be changed.
            raise _refusal(f"the chat template can't render these messages: {error}") from error
        if continue_final_message:
            text, found, _ = text.rpartition(_MARK)
            if not found:
                raise _refusal("continue_final_message: the chat template leaves out the final message's content")
        return text

    def _prepared(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _refusal("each message must be an object with a role")
        result = dict(message)
        content = result.get("content")
        if isinstance(content, str) or content is None:
            return result
        if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
            raise _refusal("a message's content must be a string or a list of parts")
        for part in content:
            if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
                raise _refusal(f"content parts of type {part.get('type')!r} aren't supported; text is")
        # Parts are joined by a line break, as vLLM does for templates that expect strings.
        result["content"] = (
            [dict(part) for part in content] if self._takes_parts else "\n".join(part["text"] for part in content)
        )
        return result


def _refusal(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")


def _mark_end(messages: list[dict[str, Any]]) -> None:
    """Put a mark behind the last message's text: where the rendered text is to be cut."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _MARK
    elif isinstance(content, list) and content:
        content[-1]["text"] += _MARK
    else:
        raise _refusal("continue_final_message needs a final message with text")


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether a template loops over a message's content, and so takes a list of parts."""
    names = {"content"}

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in names
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        if isinstance(node, nodes.Filter):
            return node.node is not None and is_content(node.node)
        return False

    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and is_content(assignment.node):
            names.add(assignment.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which models haven't seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
