"""The envelope: what comes back is what was stored, or nothing."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetrie.kv.tiers.interface import PageRef
from pagetrie.kv.tiers.record import HEAD_BYTES, Checksum, Seal, Signature, matches, pack_head, parse_head
from tests.kv.tiers.pages import SECRET, chain

SEALS: list[Seal] = [Checksum(), Signature(SECRET)]


@pytest.mark.parametrize("seal", SEALS)
@given(data=st.binary(max_size=300), count=st.integers(1, 256))
def test_a_record_comes_back(seal: Seal, data: bytes, count: int) -> None:
    (ref,) = chain(1, size=count)
    front = pack_head(ref, data, seal)
    head = parse_head(front + data, seal)
    assert head is not None
    assert head.ref == ref and head.size == len(front) == HEAD_BYTES + 4 * count and head.page_bytes == len(data)
    assert matches(head, ref, data, seal)


@pytest.mark.parametrize("seal", SEALS)
@given(flips=st.integers(0), data=st.binary(min_size=1, max_size=40))
def test_no_flipped_bit_goes_unnoticed(seal: Seal, flips: int, data: bytes) -> None:
    (ref,) = chain(1)
    record = bytearray(pack_head(ref, data, seal) + data)
    place = flips % (8 * len(record))
    record[place // 8] ^= 1 << place % 8
    front = len(record) - len(data)
    assert not matches(parse_head(record, seal), ref, record[front:], seal)


@pytest.mark.parametrize("seal", SEALS)
@given(cut=st.integers(0), data=st.binary(min_size=1, max_size=40))
def test_a_cut_record_is_none(seal: Seal, cut: int, data: bytes) -> None:
    (ref,) = chain(1)
    record = pack_head(ref, data, seal) + data
    front, cut = len(record) - len(data), cut % len(record)
    assert not matches(parse_head(record[:cut], seal), ref, record[front:cut], seal)


def test_a_page_of_another_name_is_refused() -> None:
    """Other tokens, namespace, parent or seal: each alone is enough."""
    one, two = chain(2)
    (other,) = chain(1, name=b"b")
    data = b"page"
    head = parse_head(pack_head(one, data, SEALS[0]), SEALS[0])
    assert matches(head, one, data, SEALS[0])
    for wrong in (
        PageRef(two.key, one.parent, one.namespace, one.tokens),
        PageRef(one.key, two.parent, one.namespace, one.tokens),
        PageRef(one.key, one.parent, other.namespace, one.tokens),
        PageRef(one.key, one.parent, one.namespace, two.tokens),
    ):
        assert not matches(head, wrong, data, SEALS[0])
    assert parse_head(pack_head(one, data, SEALS[0]), SEALS[1]) is None
    assert parse_head(pack_head(one, data, Signature(bytes(32))), SEALS[1]) is None


def test_a_pickle_is_no_record() -> None:
    """H4: nothing is unpickled, whatever lies there."""

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, ("raise SystemExit",)

    assert parse_head(pickle.dumps(Bomb()) * 10, SEALS[0]) is None
