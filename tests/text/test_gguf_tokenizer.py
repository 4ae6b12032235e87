"""GGUF vocabularies of both kinds, their splitting rules, and the cache of the conversion."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from pagetrie.errors import InvalidRequestError, ModelLoadError
from pagetrie.models.gguf_config import GgufMetadata
from pagetrie.models.gguf_file import GgufFile
from pagetrie.models.gguf_vocabulary import read_vocabulary
from pagetrie.text import gguf_tokenizer
from pagetrie.text.gguf_tokenizer import GgufVocabulary, convert, tokenizer_from_gguf
from pagetrie.text.pretokenizers import PRE_TOKENIZERS
from pagetrie.text.tokenizer import Tokenizer

UNKNOWN, CONTROL, USER_DEFINED, NORMAL, BYTE = 2, 3, 4, 1, 6
SAMPLES = [
    "Hello world! It's 12345678 o'clock, we'LL see\n\n\n  indented\tcode();\r\n",
    "naïve café e\u0301 ½ ٣٤٥ 日本語テキスト 한국어 🙂🏳️‍🌈   spaces   \u00a0x",
    "ThisIsCamelCase ABCdef aBC $100.50 foo_bar/baz?q=1&r=2 <tag a='b'>",
]


@pytest.fixture(scope="module")
def smollm(bundled_model: Path) -> GgufVocabulary:
    return read_vocabulary(GgufMetadata(bundled_model, GgufFile(bundled_model).metadata))


def built(vocabulary: GgufVocabulary) -> Tokenizer:
    backend = Backend.from_str(json.dumps(convert(vocabulary)))
    settings = {"bos_id": vocabulary.bos_id, "eos_id": vocabulary.eos_id, "chat_template": vocabulary.chat_template}
    return Tokenizer(backend, vocab_size=vocabulary.size, **settings)


@pytest.mark.parametrize(("pre", "other"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_ids_as_transformers_gives_them(smollm: GgufVocabulary, pre: str, other: type[Any]) -> None:
    vocab = {token: index for index, token in enumerate(smollm.tokens())}
    theirs = other(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in smollm.merges()])
    ours = built(replace(smollm, pre=pre))
    for text in SAMPLES:
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False), text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "in 12345", ["in", " 12345"]),
        ("smollm", "in 12345", ["in", " ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", "in 12345", ["in", " ", "123", "45"]),
        ("llama-bpe", "WE'RE(x)\n\n", ["WE", "'RE", "(x", ")\n\n"]),
        ("qwen2", "in 123", ["in", " ", "1", "2", "3"]),
        ("tekken", "camelCase XMLFile", ["camel", "Case", " XMLFile"]),
        ("gpt-4o", "don't 1234", ["don't", " ", "123", "4"]),
        ("deepseek-llm", "ab 12 中文", ["ab", " ", "12", " ", "中文"]),
        ("deepseek-v3", "ab 1234 中文", ["ab", " ", "123", "4", " ", "中文"]),
        ("default", "a 12345", ["a", " ", "123", "45"]),
        ("falcon", "a 12345", ["a", " ", "123", "45"]),
    ],
)
def test_splitting_rules(pre: str, text: str, pieces: list[str]) -> None:
    assert split(pre, text) == pieces


def split(pre: str, text: str) -> list[str]:
    """The pieces of a text, without the change to the byte alphabet."""
    rule = PRE_TOKENIZERS[pre].json()
    rule["pretokenizers"] = rule["pretokenizers"][:-1]
    holder = json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": rule, "model": EMPTY_MODEL})
    pre_tokenizer: PreTokenizer = Backend.from_str(holder).pre_tokenizer
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


EMPTY_MODEL = {"type": "BPE", "vocab": {}, "merges": []}


@pytest.mark.parametrize("pre", list(PRE_TOKENIZERS))
def test_every_rule_keeps_the_text_and_agrees_with_another_engine(pre: str) -> None:
    for text in SAMPLES:
        pieces = [text]
        for pattern in PRE_TOKENIZERS[pre].patterns:
            pieces = [part for piece in pieces for part in cut(pattern, piece)]
        assert split(pre, text) == pieces
        assert "".join(pieces) == text


def cut(pattern: str, text: str) -> list[str]:
    """Matches and what lies between, in order."""
    parts, last = [], 0
    for match in regex.finditer(pattern, text):
        parts += [text[last : match.start()], match.group()]
        last = match.end()
    return [part for part in (*parts, text[last:]) if part]


def test_llama3_takes_a_whole_word_without_merging() -> None:
    byte_tokens = ["a", "b", "c", "ab", "abc"]
    vocabulary = tiny_vocabulary("gpt2", byte_tokens, merges=["a b"], pre="llama-bpe")
    assert built(vocabulary).encode("abc", add_special=False) == [4]
    assert built(replace(vocabulary, pre="gpt-2")).encode("abc", add_special=False) == [3, 2]


@pytest.mark.parametrize(
    ("pre", "add_bos", "begins"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos(pre: str, add_bos: bool | None, begins: bool) -> None:
    vocabulary = tiny_vocabulary("gpt2", ["a", "b", "<s>"], [NORMAL, NORMAL, CONTROL], merges=[], pre=pre)
    tokenizer = built(replace(vocabulary, bos_id=2, add_bos=add_bos))
    assert tokenizer.encode("ab") == [2, 0, 1] if begins else [0, 1]
    assert tokenizer.encode("ab", add_special=False) == [0, 1]


def test_user_defined_tokens_are_parsed_but_not_special() -> None:
    vocabulary = tiny_vocabulary("gpt2", ["a", "b", "<é x>"], [NORMAL, NORMAL, USER_DEFINED], merges=[])
    tokenizer = built(vocabulary)
    assert tokenizer.encode("a<é x>b") == [0, 2, 1]
    assert tokenizer.special_ids == set()
    # Its text is as written, not in the byte alphabet.
    assert tokenizer.token_bytes(2) == "<é x>".encode()
    assert tokenizer.decode([0, 2, 1]) == "a<é x>b"


def tiny_vocabulary(
    model: str,
    tokens: list[str],
    types: list[int] | None = None,
    *,
    scores: list[float] | None = None,
    merges: list[str] | None = None,
    pre: str = "gpt-2",
) -> GgufVocabulary:
    return GgufVocabulary(
        source="tiny.gguf",
        model=model,
        pre=pre,
        digest="0",
        size=len(tokens),
        tokens=lambda: tokens,
        token_types=lambda: list(types or []),
        scores=lambda: list(scores or []),
        merges=lambda: list(merges or []),
        bos_id=None,
        eos_id=None,
        end_ids=frozenset(),
        add_bos=False,
        add_space_prefix=None,
        chat_template=None,
    )


PIECES = ["a", "b", "▁", "é", "ab", "▁a", "▁ab", "ba", "aa", "aab", "bab", "▁▁", "▁▁▁▁", "abab", "éa"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
SPM_TYPES = [UNKNOWN, CONTROL, CONTROL, *([BYTE] * 256), *([NORMAL] * len(PIECES))]
PIECE_SCORES = [-20.0, -21.0, -22.0, -23.0, -1.0, -4.0, -2.0, -3.0, -5.0, -6.0, -7.0, -8.0, -9.0, -1.5, -0.5]
SPM_SCORES = [*([0.0] * 259), *PIECE_SCORES]
SPM = replace(tiny_vocabulary("llama", SPM_TOKENS, SPM_TYPES, scores=SPM_SCORES), bos_id=1, eos_id=2, add_bos=None)


def sentencepiece(text: str, *, prefix: bool = True) -> list[int]:
    """SentencePiece's BPE by its definition: join the neighbours that score best, the leftmost of equals, and again."""
    pieces = list(("▁" if prefix and text else "") + text.replace(" ", "▁"))
    normal = dict(zip(PIECES, PIECE_SCORES, strict=True))
    while True:
        pairs = enumerate(a + b for a, b in itertools.pairwise(pieces))
        joined = [(-normal[pair], at) for at, pair in pairs if pair in normal]
        if not joined:
            break
        at = min(joined)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids = []
    for piece in pieces:
        ids += [SPM_TOKENS.index(piece)] if piece in normal else [3 + byte for byte in piece.encode()]
    return ids


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text("ab é", max_size=12), st.text(max_size=8)))
def test_sentencepiece_ids(text: str) -> None:
    text = text.replace("▁", "_")
    tokenizer = SPM_BUILT
    assert tokenizer.encode(text, add_special=False) == sentencepiece(text)
    ids = tokenizer.encode(text)
    assert ids == [1, *sentencepiece(text)]
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids[1:])) == (b" " if text else b"") + text.encode()


SPM_BUILT = built(SPM)


def test_sentencepiece_without_a_space_in_front() -> None:
    tokenizer = built(replace(SPM, add_space_prefix=False, add_bos=False))
    for text in ("ab ab", " ab", "bab", ""):
        assert tokenizer.encode(text) == sentencepiece(text, prefix=False)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_facts() -> None:
    assert SPM_BUILT.special_ids == {0, 1, 2}
    assert SPM_BUILT.eos_ids == {2}
    assert SPM_BUILT.token_bytes(3 + 0xE2) == b"\xe2"
    assert SPM_BUILT.token_bytes(SPM_TOKENS.index("▁ab")) == b" ab"
    assert SPM_BUILT.encode("a</s>b", add_special=False)[1] == 2


def test_scores_that_are_no_numbers() -> None:
    scores = [*SPM_SCORES[:-1], float("nan")]
    with pytest.raises(ModelLoadError, match="scores holds a value that isn't a number"):
        convert(replace(SPM, scores=lambda: scores))


def test_more_embeddings_than_tokens() -> None:
    vocabulary = tiny_vocabulary("gpt2", ["a", "b"], merges=[])
    tokenizer = Tokenizer(
        Backend.from_str(json.dumps(convert(vocabulary))), vocab_size=64, bos_id=None, eos_id=None, chat_template=None
    )
    tokenizer.check_ids([63])
    assert tokenizer.token_bytes(63) == b""
    assert tokenizer.decode([0, 63, 1]) == "ab"


def test_more_tokens_than_embeddings() -> None:
    vocabulary = tiny_vocabulary("gpt2", ["a", "b", "<pad>"], [NORMAL, NORMAL, CONTROL], merges=[])
    tokenizer = Tokenizer(
        Backend.from_str(json.dumps(convert(vocabulary))), vocab_size=2, bos_id=None, eos_id=None, chat_template=None
    )
    assert tokenizer.encode("ab") == [0, 1]
    with pytest.raises(InvalidRequestError, match="token id 2 is outside the vocabulary of 2 tokens"):
        tokenizer.encode("a<pad>")


def forbidden() -> Any:
    raise AssertionError("converted again")


def test_the_conversion_is_cached(tmp_path: Path) -> None:
    first = tokenizer_from_gguf(SPM, tmp_path, vocab_size=SPM.size)
    (file,) = (tmp_path / "tokenizers").iterdir()
    frozen = replace(SPM, tokens=forbidden, scores=forbidden, merges=forbidden, token_types=forbidden)
    again = tokenizer_from_gguf(frozen, tmp_path, vocab_size=SPM.size)
    assert again.encode("ab é") == first.encode("ab é")
    # Anything that changes the conversion has an entry of its own.
    for other in (replace(frozen, digest="1"), replace(frozen, add_bos=False), replace(frozen, add_space_prefix=False)):
        with pytest.raises(AssertionError, match="converted again"):
            tokenizer_from_gguf(other, tmp_path, vocab_size=SPM.size)
    assert list((tmp_path / "tokenizers").iterdir()) == [file]


@pytest.mark.parametrize("damage", ["truncate", "change", "empty", "folder"])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, damage: str) -> None:
    first = tokenizer_from_gguf(SPM, tmp_path, vocab_size=SPM.size)
    (file,) = (tmp_path / "tokenizers").iterdir()
    good = file.read_bytes()
    if damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        # A changed byte leaves valid JSON that means something else.
        bad = {"truncate": good[:-10], "change": good.replace(b'"aab"', b'"aac"'), "empty": b""}[damage]
        assert bad != good
        file.write_bytes(bad)
    again = tokenizer_from_gguf(SPM, tmp_path, vocab_size=SPM.size)
    assert again.encode("aab é") == first.encode("aab é")
    if damage != "folder":
        assert file.read_bytes() == good


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    tokenizer = tokenizer_from_gguf(SPM, blocked, vocab_size=SPM.size)
    assert tokenizer.encode("ab") == SPM_BUILT.encode("ab")


def test_a_new_version_of_the_conversion_takes_no_old_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer_from_gguf(SPM, tmp_path, vocab_size=SPM.size)
    monkeypatch.setattr(gguf_tokenizer, "_CONVERSION", "another")
    with pytest.raises(AssertionError, match="converted again"):
        tokenizer_from_gguf(replace(SPM, tokens=forbidden), tmp_path, vocab_size=SPM.size)
