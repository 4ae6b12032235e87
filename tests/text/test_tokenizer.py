"""The tokenizer of the bundled model: byte-level BPE out of a GGUF file."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetrie.errors import InvalidRequestError
from pagetrie.models.loading import load_checkpoint
from pagetrie.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_checkpoint(bundled_model, tmp_path_factory.mktemp("cache")).tokenizer()


TEXTS = [
    "Hello world",
    "  leading and trailing  ",
    "def f(x):\n\treturn x ** 2  # Kommentar\n\n\n    if not x:\r\n        pass",
    "3.14159 and 1234567890, ¾ and ٣",
    "naïve café, Straße, Ångström, e\u0301",
    "日本語のテキスト、中文字符，한국어",
    "مرحبا بالعالم שלום עולם",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🙂🙃 \u200b\ufeff",
    "it's they'll WE'RE I'D",
    "\x00\x01\x80\u2028\u2029",
    "a" * 5000,
    '{"json": [1, 2, {"k": "v\\n"}]}',
]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids) == text


# SmolLM2's vocabulary lacks some control characters and bytes of rare planes: they were absent from its training.
KNOWN = st.characters(exclude_categories=("Cs", "Cc", "Cn", "Co"), max_codepoint=0x3FFFF) | st.sampled_from("\t\n\r\0")


@settings(max_examples=300, deadline=None)
@given(st.text(KNOWN))
def test_bytes_of_the_tokens_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids, skip_special=False) == text


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(st.text(KNOWN), st.sampled_from(["<|im_start|>", "<|im_end|>", "<repo_name>", "<|im_", "|>"])))
)
def test_special_tokens_among_text(tokenizer: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_facts(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.bos_token) == (1, "<|im_start|>")
    assert (tokenizer.eos_id, tokenizer.eos_token) == (2, "<|im_end|>")
    assert tokenizer.eos_ids == {0, 2}  # <|endoftext|> ends a text as well
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.chat_template is not None
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.token_text(905) == "Ġworld"
    assert tokenizer.token_id("Ġworld") == 905
    assert tokenizer.token_id("no such token") is None
    assert tokenizer.encode("") == []


def test_bytes_without_a_token_are_dropped(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\x04b")) == "ab"


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.token_bytes(index) for index in tokenizer.encode("in 2024")]
    assert pieces == [b"in", b" ", b"2", b"0", b"2", b"4"]


def test_special_tokens_in_a_text_are_parsed(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>", add_special=False)
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "user\nhi"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>"
    # This model wants no BOS in front.
    assert tokenizer.encode("hi") == tokenizer.encode("hi", add_special=False)


def test_every_token_has_bytes(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]
    assert all(pieces)
    assert len({piece for index, piece in enumerate(pieces) if index >= 17}) == tokenizer.vocab_size - 17
    assert tokenizer.token_bytes(905) is tokenizer.token_bytes(905)


def test_half_a_character_decodes_to_the_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂")
    assert len(ids) > 1
    assert tokenizer.decode(ids[:1]) == "\ufffd"


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        ([5, 49152], "token id 49152 is outside the vocabulary of 49152 tokens (0 to 49151)"),
        ([-1], "token id -1 is outside the vocabulary of 49152 tokens"),
        ([2**63], f"token id {2**63} is outside"),
        ([10**5000], "token id a number of 16610 bits is outside"),
        ([1.0], "token ids must be integers, got 1.0"),
        ([True], "token ids must be integers, got True"),
        (["1"], "token ids must be integers, got '1'"),
    ],
)
def test_ids_that_are_refused(tokenizer: Tokenizer, ids: list[int], named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.check_ids(ids, param="prompt")
    assert named in caught.value.message
    assert caught.value.param == "prompt"
    assert caught.value.status == 400


def test_ids_that_are_accepted(tokenizer: Tokenizer) -> None:
    tokenizer.check_ids([])
    tokenizer.check_ids([0, 49151])


def test_ids_without_a_token_have_no_text(tokenizer: Tokenizer) -> None:
    for index in (-1, 49152, 2**70):
        assert tokenizer.token_bytes(index) == b""
        assert tokenizer.token_text(index) is None


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="isn't valid Unicode"):
        tokenizer.encode("half \ud83d")


def test_encoding_lets_other_threads_run(tokenizer: Tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    stop = threading.Event()
    moments: list[float] = []

    def tick() -> None:
        while not stop.wait(0.001):
            moments.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        begin = time.monotonic()
        ids = tokenizer.encode(text)
        end = time.monotonic()
    finally:
        stop.set()
        thread.join()
    assert len(ids) > 100_000
    during = [begin, *(moment for moment in moments if begin < moment < end), end]
    # Held up, the other thread would stand still for nearly all of the time.
    assert max(after - before for before, after in itertools.pairwise(during)) < (end - begin) / 2
