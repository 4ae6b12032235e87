"""The page pool's states and the byte form of tokens."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetrie.kv.pool import PagePool, PageStateError
from pagetrie.kv.tokens import TOKEN_BYTES, common_prefix, pack_tokens


def test_a_page_freed_twice_in_one_call_is_refused_not_listed_twice() -> None:
    pool = PagePool(4)
    (page,) = pool.allocate(1)
    with pytest.raises(PageStateError, match=f"page {page} is not private"):
        pool.release([page, page])
    pool.check()
    assert pool.free_pages == 4


def test_transitions_that_a_state_does_not_allow_are_refused() -> None:
    pool = PagePool(4)
    shared, indexed = pool.allocate(2)
    pool.share([shared])
    pool.give_to_index([indexed])
    for transition, page in [
        (pool.give_to_index, shared),
        (pool.give_to_index, indexed),
        (pool.share, indexed),
        (pool.release, indexed),
        (pool.take_from_index, shared),
        (pool.share, 3),
        (pool.release, 3),
    ]:
        with pytest.raises(PageStateError):
            transition([page])
        pool.check()
    with pytest.raises(PageStateError, match="3 pages asked for, 2 free"):
        pool.allocate(3)
    pool.release([shared])
    pool.release([shared])
    pool.take_from_index([indexed])
    pool.check()
    assert pool.free_pages == 4


def test_each_page_is_handed_out_once() -> None:
    pool = PagePool(10)
    assert pool.allocate(0) == []
    assert sorted(pool.allocate(4) + pool.allocate(1) + pool.allocate(5)) == list(range(10))


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_are_u32_little_endian(tokens: list[int]) -> None:
    assert pack_tokens(tokens) == struct.pack(f"<{len(tokens)}I", *tokens)


@given(st.data())
def test_the_common_prefix_equals_a_byte_by_byte_count(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    b = bytes(rng.choices(b"ab", k=rng.randrange(40)))
    offset = rng.randrange(len(b) + 1)
    a = bytearray(b[offset:] + bytes(rng.choices(b"ab", k=rng.randrange(10))))
    if a and rng.random() < 0.8:
        a[rng.randrange(len(a))] ^= 1
    limit = rng.randrange(len(b) + 2 * TOKEN_BYTES)
    expected = 0
    while expected < min(limit, len(a), len(b) - offset) and a[expected] == b[offset + expected]:
        expected += 1
    assert common_prefix(a, b, offset, limit) == expected
