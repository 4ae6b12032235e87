"""What the server needs of the text layer: ``pagetrie.text`` provides it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol


class TokenizerLike(Protocol):
    """See ``pagetrie.text.tokenizer.Tokenizer``."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def special_ids(self) -> Collection[int]: ...
    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...
    def token_bytes(self, token_id: int, /) -> bytes: ...
    def token_text(self, token_id: int, /) -> str | None: ...
    def check_ids(self, ids: Sequence[int], *, param: str | None = None) -> None: ...


class ChatTemplateLike(Protocol):
    """See ``pagetrie.text.chat_template.ChatTemplate``."""

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str: ...
