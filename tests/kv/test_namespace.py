"""Namespaces: unequal parts never encode to equal bytes."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetrie.kv import CacheManager, encode_namespace
from pagetrie.kv.namespace import decode_namespace, extend_namespace

KINDS = ("adapter", "salt", "media", "dtype")
TINY = (None, "", "X", "n", "s\x01", b"", b"X", 0, 1, -1)

parts = st.dictionaries(
    st.text(alphabet="ab\x00\x01", max_size=3),
    st.none() | st.text(alphabet="aX0\x00", max_size=3) | st.binary(max_size=3) | st.integers(-3, 300),
    max_size=3,
)


def typed(values: dict[str, object]) -> set[tuple[str, type, object]]:
    return {(kind, type(value), value) for kind, value in values.items()}


def test_a2_an_adapters_name_is_not_a_salt() -> None:
    assert encode_namespace({"adapter": "X", "salt": None}) != encode_namespace({"adapter": None, "salt": "X"})
    assert encode_namespace({"adapter": "X"}) != encode_namespace({"salt": "X"})


def test_all_combinations_of_tiny_values_differ() -> None:
    encoded = {encode_namespace(dict(zip(KINDS, values, strict=True))) for values in product(TINY, repeat=len(KINDS))}
    assert len(encoded) == len(TINY) ** len(KINDS)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"salt": None}, {"salt": ""}),
        ({"salt": None}, {}),
        ({"salt": None}, {"salt": 0}),
        ({"salt": ""}, {"salt": b""}),
        ({"salt": "0"}, {"salt": 0}),
        ({"salt": "X"}, {"salt": b"X"}),
        ({"a": "b"}, {"ab": ""}),
        ({"a": "1", "b": "2"}, {"a": "1b2"}),
        # A second part, written into the first one's value or name as it would stand in the encoding.
        ({"a": "x", "b": "y"}, {"a": "x\x01\0\0\0bsy"}),
        ({"a": "x", "b": "y"}, {"a": "x\x01\0\0\0bs\x01\0\0\0\0\0\0\0y"}),
        ({"a": None, "b": None}, {"an\0\0\0\0\0\0\0\0b": None}),
        ({"a": None, "b": None}, {"an\0\0\0\0\0\0\0\0\x01\0\0\0b": None}),
        ({"salt": "é"}, {"salt": "e\u0301"}),
    ],
)
def test_look_alikes_differ(a: dict[str, str | int | bytes | None], b: dict[str, str | int | bytes | None]) -> None:
    assert encode_namespace(a) != encode_namespace(b)


@given(parts, parts)
def test_equal_bytes_mean_equal_parts(a: dict, b: dict) -> None:
    assert (encode_namespace(a) == encode_namespace(b)) == (typed(a) == typed(b))


@given(parts, st.binary(max_size=3))
def test_the_parts_can_be_read_again(a: dict, value: bytes) -> None:
    extended = extend_namespace(encode_namespace(a), "~", value)
    assert typed(decode_namespace(encode_namespace(a))) == typed(a)
    assert typed(decode_namespace(extended)) == typed({**a, "~": value})


@given(parts, st.integers(0, 60), st.binary(max_size=20))
def test_what_is_no_namespace_is_refused_or_read_as_one(a: dict, cut: int, more: bytes) -> None:
    for data in (more, encode_namespace(a)[:cut] + more, encode_namespace({"salt": "X"})[:-1]):
        try:
            decode_namespace(data)
        except ValueError:
            continue
        assert data.startswith(encode_namespace({}))


@given(parts)
def test_the_order_of_the_parts_does_not_matter(a: dict) -> None:
    assert encode_namespace(a) == encode_namespace(dict(reversed(a.items())))


@given(st.lists(parts, min_size=2, max_size=8))
def test_no_encoding_is_the_start_of_another_with_as_many_parts(many: list[dict]) -> None:
    """Length framing: with equal kinds, values can't run into each other."""
    for a, b in product(many, many):
        if a.keys() == b.keys() and typed(a) != typed(b):
            assert not encode_namespace(a).startswith(encode_namespace(b))


@pytest.mark.parametrize("value", [True, 1.0, ["X"], ("X",), bytearray(b"X")])
def test_other_types_are_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=f"'salt' has unsupported type {type(value).__name__}"):
        encode_namespace({"salt": value})


def test_text_that_is_not_valid_unicode_is_still_encoded_apart() -> None:
    """JSON may carry half a surrogate pair."""
    assert len({encode_namespace({"salt": salt}) for salt in ("\ud800", "\udc00", "\ud800\udc00", "?", "")}) == 5


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_one_part_that_differs_means_no_hit(index: str) -> None:
    manager = CacheManager(num_pages=8, page_size=4, index=index)
    base = {"model": "m", "codec": "fp16", "page_size": 4, "adapter": None, "salt": "t"}
    prompt = [1, 2, 3, 4, 5, 6]
    lease = manager.open(prompt, encode_namespace(base))
    lease.extend(6)
    lease.commit(6)
    lease.close()
    for part, value in [("model", "n"), ("codec", "int8"), ("page_size", 8), ("adapter", "t"), ("salt", None)]:
        assert manager.open(prompt, encode_namespace({**base, part: value})).cached_tokens == 0
    assert manager.open(prompt, encode_namespace(dict(reversed(base.items())))).cached_tokens == 5
