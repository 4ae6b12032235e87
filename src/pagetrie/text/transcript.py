"""A chat as messages and as text, so that tokens computed for its beginning serve for what follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Render = Callable[..., str]
"""See ``ChatTemplate.render``."""
Encode = Callable[[str], list[int]]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Transcript:
    """A chat so far.

    Attributes:
        messages: what was said.
        text: the same as the model saw it; may end inside a message that is being answered.
        tools: function schemas that the template was given.
        variables: further variables that it was given.
    """

    messages: tuple[Message, ...] = ()
    text: str = ""
    tools: Sequence[Message] | None = None
    variables: Mapping[str, Any] | None = None

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], render: Render, encode: Encode, *, answer: bool
    ) -> tuple[list[int], Transcript]:
        """Add messages.

        Args:
            ids: the tokens of ``text``.
            messages: what follows; may be empty.
            render, encode: the template, and the tokenizer without special tokens of its own.
            answer: end with the opening of an assistant's message.

        Returns:
            The tokens of the longer chat, and the chat. They begin with ``ids`` where the template writes the longer
            chat as it wrote the shorter one; where it doesn't, all is tokenised anew.

        Raises:
            InvalidRequestError: the template refuses the conversation.
        """
        every = (*self.messages, *messages)
        text = render(list(every), self.tools, add_generation_prompt=answer, **(self.variables or {}))
        chat = replace(self, messages=every, text=text)
        if text.startswith(self.text):
            return [*ids, *encode(text[len(self.text) :])], chat
        return encode(text), chat

    def answered(self, answer: str) -> Transcript:
        """The chat with the assistant's answer at its end."""
        message = {"role": "assistant", "content": answer}
        return replace(self, messages=(*self.messages, message), text=self.text + answer)
