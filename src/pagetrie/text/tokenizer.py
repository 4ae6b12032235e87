"""Text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer as Backend

from pagetrie.errors import InvalidRequestError, ModelLoadError

# Texts of special tokens that end a turn or a text, in the chat formats of the supported families. A file names one
# end-of-sequence token; chat models often end a turn with another of these.
_END_TEXTS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>"),
    *("<end_of_turn>", "<|end_of_turn|>", "<|eot|>", "<EOT>", "<｜end▁of▁sentence｜>", "</s>"),
)


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's bytes_to_unicode), reversed."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads.

    Attributes:
        vocab_size: token ids are 0 to vocab_size - 1: the model's embedding rows, which may be more than its tokens.
        bos_id: the token that begins a text, or None; ``bos_token`` is its text.
        eos_id: the token that the model names as end of sequence, or None; ``eos_token`` is its text.
        eos_ids: every id that ends a generation: ``eos_id``, those given as ``end_ids``, and special tokens that end a
            turn or a text by common custom (``<|im_end|>``, ``<|eot_id|>``, ...).
        special_ids: control tokens; left out of text by default.
        chat_template: the model's Jinja chat template, or None.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        vocab_size: int,
        bos_id: int | None,
        eos_id: int | None,
        end_ids: frozenset[int] = frozenset(),
        chat_template: str | None,
    ) -> None:
        """Raises ModelLoadError if the tokenizer's kind isn't supported (byte-level and SentencePiece BPE are)."""
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size = vocab_size
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.bos_token = self._token_or_none(bos_id)
        self.eos_token = self._token_or_none(eos_id)
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        named = end_ids if eos_id is None else end_ids | {eos_id}
        self.eos_ids = named | {index for index in self.special_ids if added[index].content in _END_TEXTS}
        self._added = {index: token.content.encode("utf-8") for index, token in added.items()}
        self._bytes: list[bytes | None] = [None] * vocab_size
        # Some files name tokens that the model has no embedding for.
        self._overflows = max((backend.get_vocab_size() - 1, *added)) >= vocab_size
        steps = _decoder_steps(backend)
        kinds = {step.get("type") for step in steps}
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level and not kinds & {"Metaspace", "ByteFallback", "Replace"}:
            raise ModelLoadError(
                "the tokenizer is neither byte-level BPE nor SentencePiece BPE "
                f"(its decoder is {' + '.join(sorted(str(kind) for kind in kinds)) or 'missing'})"
            )
        self._strips_space = any(
            step.get("type") == "Strip"
            or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )

    def _token_or_none(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._backend.id_to_token(token_id)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it become their ids.

        ``add_special`` adds what the model wants around a text (a BOS, for some). The work runs outside the
        interpreter lock, so other threads go on. Raises InvalidRequestError if the text holds a lone surrogate or a
        token unknown to the model. Bytes that the vocabulary has no token for are dropped, as the model's own
        tokenizer does (SmolLM2 lacks some control characters).
        """
        try:
            # Not encode(): only the batch calls release the interpreter lock. "fast" leaves out offsets.
            encoded = self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0]
        except TypeError:
            # What the library says of a text that has no UTF-8.
            _check_unicode(text)
            raise
        ids: list[int] = encoded.ids
        if self._overflows:
            self.check_ids(ids)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of token ids; bytes that aren't UTF-8 become U+FFFD. Unknown ids have no text."""
        skipped = self.special_ids if skip_special else frozenset()
        text = b"".join(self.token_bytes(index) for index in ids if index not in skipped).decode("utf-8", "replace")
        return text[1:] if self._strips_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token stands for; joined over a text's tokens they are its UTF-8 (see `encode`).

        A SentencePiece model's text may begin with one space more than was given (see `decode`). An id without a token
        has none.
        """
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it (``Ġthe``, ``▁the``, ``<0x0A>``), or None if there is none."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_id(self, text: str) -> int | None:
        """The id of the token that the vocabulary writes so, or None."""
        return self._backend.token_to_id(text)

    def check_ids(self, ids: Sequence[int], *, param: str | None = None) -> None:
        """Raises InvalidRequestError, naming the id and the vocabulary's size, unless all are ids of this model."""
        for index in ids:
            if isinstance(index, bool) or not isinstance(index, int):
                raise InvalidRequestError(f"token ids must be integers, got {index!r}"[:200], param=param)
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            wrong = next(index for index in ids if not 0 <= index < self.vocab_size)
            shown = str(wrong) if abs(wrong) < 10**30 else f"a number of {wrong.bit_length()} bits"
            raise InvalidRequestError(
                f"token id {shown} is outside the vocabulary of {self.vocab_size} tokens (0 to {self.vocab_size - 1})",
                param=param,
            )

    def _make_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        text = self._backend.id_to_token(token_id)
        if text is None:
            return b""
        if self._byte_level:
            values = [_BYTE_OF.get(character, -1) for character in text]
            # A token written in plain characters (some vocabularies list a few) stands for them as they are.
            return bytes(values) if min(values, default=0) >= 0 else text.encode("utf-8")
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes([int(text[3:5], 16)])
            except ValueError:
                pass
        return text.replace("▁", " ").encode("utf-8")


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"the text isn't valid Unicode: {error.reason} (character {error.start})"
        raise InvalidRequestError(message) from error


def _decoder_steps(backend: Backend) -> list[dict[str, object]]:
    """The steps of the backend's decoder, in tokenizer.json's form."""
    decoder = backend.decoder
    if decoder is None:
        return []
    # The library offers no other way to look inside a decoder: its pickle state is the JSON text. Nothing is unpickled.
    state = json.loads(decoder.__getstate__())
    steps = state.get("decoders", [state])
    return [step for step in steps if isinstance(step, dict)]
