"""From a GGUF vocabulary to a tokenizer, by way of Hugging Face's tokenizer.json.

The converted tokenizer.json is kept in the cache folder, under a digest of everything it was made from.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from tokenizers import Tokenizer as Backend

from pagetrie import paths
from pagetrie.errors import ModelLoadError
from pagetrie.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from pagetrie.text.tokenizer import Tokenizer

# Part of the cache key: to be raised whenever the conversion below changes its result.
_CONVERSION = "1"

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type


@dataclass(frozen=True)
class GgufVocabulary:
    """A GGUF file's tokenizer.* metadata. The callables decode long arrays and raise ModelLoadError.

    Attributes:
        source: the file, for messages.
        model: "gpt2" (byte-level BPE with merges) or "llama" (SentencePiece BPE with scores).
        pre: the name of the splitting rule of a "gpt2" vocabulary.
        digest: hex digest of the arrays' bytes.
        size: number of tokens.
        token_types, scores, merges: empty where the file has none.
        end_ids: further ids that the file says end a turn or a message.
        add_bos, add_space_prefix: None where the file doesn't say.
    """

    source: str
    model: str
    pre: str
    digest: str
    size: int
    tokens: Callable[[], list[str]]
    token_types: Callable[[], list[float]]
    scores: Callable[[], list[float]]
    merges: Callable[[], list[str]]
    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]
    add_bos: bool | None
    add_space_prefix: bool | None
    chat_template: str | None


def tokenizer_from_gguf(vocabulary: GgufVocabulary, cache_dir: Path, *, vocab_size: int) -> Tokenizer:
    """Convert, or take from the cache. ``vocab_size`` is the model's number of embedding rows.

    Raises ModelLoadError if the vocabulary is of an unknown kind or corrupt. A cache that can't be read or written is
    done without.
    """
    backend = _cached(vocabulary, cache_dir)
    return Tokenizer(
        backend,
        vocab_size=vocab_size,
        bos_id=vocabulary.bos_id,
        eos_id=vocabulary.eos_id,
        end_ids=vocabulary.end_ids,
        chat_template=vocabulary.chat_template,
    )


def _cached(vocabulary: GgufVocabulary, cache_dir: Path) -> Backend:
    parts = (_CONVERSION, vocabulary.model, vocabulary.pre, vocabulary.digest)
    settings = (vocabulary.bos_id, vocabulary.add_bos, vocabulary.add_space_prefix)
    key = blake3(json.dumps([*parts, *settings]).encode()).hexdigest()[:32]
    path = cache_dir / "tokenizers" / f"{key}.json"
    with contextlib.suppress(OSError):
        sealed = path.read_bytes()
        # A digest in front, since a damaged file can still be valid JSON.
        if sealed[:64] == blake3(sealed[64:]).hexdigest().encode():
            return Backend.from_str(sealed[64:].decode("utf-8"))
    text = json.dumps(convert(vocabulary), ensure_ascii=False)
    try:
        backend = Backend.from_str(text)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"{vocabulary.source}: the vocabulary is inconsistent: {reason}") from error
    with contextlib.suppress(OSError):
        data = text.encode("utf-8")
        paths.write_atomically(path, blake3(data).hexdigest().encode() + data)
    return backend


def convert(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """The vocabulary as the content of a tokenizer.json. Raises ModelLoadError."""
    tokens = vocabulary.tokens()
    types = [int(kind) for kind in vocabulary.token_types()] or [1] * len(tokens)
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        raise ModelLoadError(f"{vocabulary.source}: the vocabulary lists {twice!r} twice (corrupt)")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    if vocabulary.model == "gpt2":
        rule = PRE_TOKENIZERS.get(vocabulary.pre)
        if rule is None:
            raise ModelLoadError(
                f"{vocabulary.source}: pre-tokenizer {vocabulary.pre!r} isn't supported "
                f"(supported: {', '.join(sorted(PRE_TOKENIZERS))})"
            )
        parts = _byte_level(rule, ids, vocabulary.merges())
        add_bos = rule.add_bos
    else:
        merges = _score_merges(vocabulary.source, tokens, types, vocabulary.scores())
        prefix = vocabulary.add_space_prefix is not False
        parts = _sentencepiece(ids, merges, unknown, prefix=prefix)
        add_bos = True
    if vocabulary.add_bos is not None:
        add_bos = vocabulary.add_bos
    bos = vocabulary.bos_id if add_bos else None
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(index, token, special=kind != _USER_DEFINED)
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ],
        "post_processor": None if bos is None else _begin_with(tokens[bos], bos),
        **parts,
    }


def _added_token(index: int, text: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": index,
        "content": text,
        "special": special,
        **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
    }


def _begin_with(token: str, token_id: int) -> dict[str, Any]:
    sequence = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": sequence,
        "pair": [*sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _bpe(ids: dict[str, int], merges: list[list[str]], **settings: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
        **settings,
        "vocab": ids,
        "merges": merges,
    }


def _byte_level(rule: PreTokenizer, ids: dict[str, int], merges: list[str]) -> dict[str, Any]:
    pairs = []
    for merge in merges:
        # A part can't be empty, so the first character is never the separator.
        left, _, right = merge[1:].partition(" ")
        pairs.append([merge[:1] + left, right])
    return {
        "normalizer": rule.normalizer_json(),
        "pre_tokenizer": rule.json(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(ids, pairs, ignore_merges=rule.ignore_merges),
    }


def _sentencepiece(
    ids: dict[str, int], merges: list[list[str]], unknown: str | None, *, prefix: bool
) -> dict[str, Any]:
    to_marker: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    to_space: dict[str, Any] = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    steps: list[dict[str, Any]] = [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    prepend = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, to_marker]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _bpe(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _score_merges(source: str, tokens: list[str], types: list[int], scores: list[float]) -> list[list[str]]:
    """The merges that a SentencePiece BPE vocabulary implies: all ways to join two tokens to a third, best score first.

    SentencePiece stores no merges; joining the pair whose result scores best is the same as merging in this order
    (as transformers' SentencePieceExtractor does).
    """
    ids = {token: index for index, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-score, ids[left], ids[right], left, right))
    if any(score != score for score in scores):
        raise ModelLoadError(f"{source}: tokenizer.ggml.scores holds a value that isn't a number (corrupt)")
    found.sort(key=lambda merge: merge[:3])
    return [[left, right] for *_, left, right in found]
