"""From GGUF metadata (tokenizer.*) to a vocabulary that `pagetrie.text` can convert."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from blake3 import blake3

from pagetrie.errors import ModelLoadError
from pagetrie.models.gguf_config import GgufMetadata
from pagetrie.models.gguf_file import GgufArray
from pagetrie.text.gguf_tokenizer import GgufVocabulary

_T = TypeVar("_T")
_KEY = "tokenizer.ggml."
_DEFAULT_IDS = {"llama": (1, 2), "gpt2": (11, 11)}  # (bos, eos) where the file names none, as in llama.cpp


def read_vocabulary(metadata: GgufMetadata) -> GgufVocabulary:
    """Check the tokenizer's metadata; token texts are decoded only when asked for.

    Raises ModelLoadError if there is no tokenizer, or its parts don't fit each other.
    """
    tokens = metadata.array(_KEY + "tokens")
    if tokens is None or not metadata.has(_KEY + "model"):
        raise metadata.error("the file holds no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)")
    model = metadata.text(_KEY + "model")
    if model not in _DEFAULT_IDS:
        raise metadata.error(f"tokenizer model {model!r} isn't supported (supported: {', '.join(_DEFAULT_IDS)})")
    arrays = {"tokens": tokens} | {name: metadata.array(_KEY + name) for name in ("token_type", "scores", "merges")}
    for name in ("token_type", "scores"):
        array = arrays[name]
        if array is not None and array.count != tokens.count:
            raise metadata.error(f"tokenizer.ggml.{name} has {array.count} items for {tokens.count} tokens")
    needed = "merges" if model == "gpt2" else "scores"
    if arrays[needed] is None:
        raise metadata.error(f"metadata key 'tokenizer.ggml.{needed}' is missing")

    def strings(name: str) -> Callable[[], list[str]]:
        return _decoder(metadata, name, arrays[name], GgufArray.strings)

    def numbers(name: str) -> Callable[[], list[float]]:
        return _decoder(metadata, name, arrays[name], GgufArray.numbers)

    def token_id(name: str, default: int | None = None) -> int | None:
        value = metadata.optional_integer(f"{_KEY}{name}_token_id")
        if value is not None and value >= tokens.count:
            raise metadata.error(f"tokenizer.ggml.{name}_token_id is {value}, but there are {tokens.count} tokens")
        return default if value is None else value

    default_bos, default_eos = (i if i < tokens.count else None for i in _DEFAULT_IDS[model])
    digest = blake3()
    for name, array in arrays.items():
        raw = b"" if array is None else bytes(array.raw)
        digest.update(name.encode() + len(raw).to_bytes(8, "little") + raw)
    template = "tokenizer.chat_template"
    return GgufVocabulary(
        source=str(metadata.path),
        model=model,
        pre=metadata.text(_KEY + "pre", "default"),
        digest=digest.hexdigest(),
        size=tokens.count,
        tokens=strings("tokens"),
        token_types=numbers("token_type"),
        scores=numbers("scores"),
        merges=strings("merges"),
        bos_id=token_id("bos", default_bos),
        eos_id=token_id("eos", default_eos),
        end_ids=frozenset(i for i in (token_id("eot"), token_id("eom")) if i is not None),
        add_bos=metadata.flag(_KEY + "add_bos_token"),
        add_space_prefix=metadata.flag(_KEY + "add_space_prefix"),
        chat_template=metadata.text(template) if metadata.has(template) else None,
    )


def _decoder(
    metadata: GgufMetadata, name: str, array: GgufArray | None, decode: Callable[[GgufArray], list[_T]]
) -> Callable[[], list[_T]]:
    def decoded() -> list[_T]:
        if array is None:
            return []
        try:
            return decode(array)
        except ValueError as error:
            raise ModelLoadError(f"{metadata.path}: metadata key 'tokenizer.ggml.{name}' {error} (corrupt)") from error

    return decoded
