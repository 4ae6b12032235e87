"""The memory tier against a list in order of use."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetrie.errors import ConfigError
from pagetrie.kv.tiers.interface import PageRef
from pagetrie.kv.tiers.ram import ENTRY_BYTES, RamTier
from tests.kv.tiers.pages import PAGE_BYTES, Halves, chain, content, read

REFS = chain(8)
operations = st.lists(st.tuples(st.sampled_from(["put", "get", "contains", "clear"]), st.integers(0, 7)), max_size=60)


@given(operations=operations, slots=st.integers(1, 5), codec=st.sampled_from([None, Halves()]))
def test_it_holds_the_most_recently_used(operations: list[tuple[str, int]], slots: int, codec: Halves | None) -> None:
    size, mask = (PAGE_BYTES, 0xFF) if codec is None else (codec.encoded_bytes, 0xF0)
    tier = RamTier(slots * (size + ENTRY_BYTES) + 7, PAGE_BYTES, codec=codec)
    model: list[PageRef] = []
    for name, number in operations:
        ref = REFS[number]
        if name == "clear" and number == 0:
            tier.clear()
            model.clear()
        elif name == "put":
            assert tier.put([(ref, content(ref))]) == 1
            model = [*(other for other in model if other != ref), ref][-slots:]
        elif name in ("get", "contains"):
            there = ref in model
            assert (read(tier, [ref], mask) == [ref] if name == "get" else tier.contains([ref.key]) == 1) == there
            if there:
                model.remove(ref)
                model.append(ref)
        assert [other for other in REFS if tier.holds(other.key)] == [other for other in REFS if other in model]
        assert tier.stats.pages == len(model)
        assert tier.stats.used_bytes == len(model) * (size + ENTRY_BYTES) <= tier.stats.capacity_bytes
        assert tier.stats.hit_bytes == tier.stats.hit_pages * size


def test_a_page_that_cannot_be_encoded_is_refused_and_takes_no_room() -> None:
    tier = RamTier(2 * (Halves.encoded_bytes + ENTRY_BYTES), PAGE_BYTES, codec=Halves())
    one, two, bad = chain(3)
    broken = content(bad)
    broken[0] = 255
    for _ in range(5):
        assert tier.put([(bad, broken)]) == 0 and not tier.holds(bad.key)
    assert tier.put([(one, content(one)), (bad, broken), (two, content(two))]) == 2
    assert read(tier, [one, two], 0xF0) == [one, two]
    assert (tier.stats.refused_pages, tier.stats.stored_pages, tier.stats.evicted_pages) == (6, 2, 0)


def test_a_codec_for_other_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="pages have 999 bytes, the codec is for 1000"):
        RamTier(10**6, 999, codec=Halves())


def test_a_slot_that_is_read_is_not_reused() -> None:
    """D6: a read goes on while everything around it is pushed out, and while all is forgotten."""
    tier = RamTier(2 * (PAGE_BYTES + ENTRY_BYTES), PAGE_BYTES)
    one, two, three, four = chain(4)
    for ref in (one, two):
        tier.put([(ref, content(ref))])
    reading = tier.get([one])
    data = next(reading)
    for ref in (three, four):
        assert tier.put([(ref, content(ref))]) == 1
    assert (data == content(one)).all()
    tier.clear()
    for ref in (two, three):
        tier.put([(ref, content(ref))])
    assert tier.holds(three.key) and not tier.holds(two.key)  # the other slot is still read
    assert (data == content(one)).all()
    reading.close()  # type: ignore[attr-defined]
    assert tier.put([(four, content(four))]) == 1
    assert read(tier, [three]) == [three] and read(tier, [four]) == [four]


def test_what_is_about_to_be_read_is_pushed_out_last() -> None:
    tier = RamTier(3 * (PAGE_BYTES + ENTRY_BYTES), PAGE_BYTES)
    one, two, three, four, five = chain(5)
    for ref in (one, two, three):
        tier.put([(ref, content(ref))])
    assert tier.contains([one.key, two.key, four.key]) == 2
    tier.put([(four, content(four))])
    assert not tier.holds(three.key)
    tier.put([(five, content(five))])
    assert tier.holds(one.key) and not tier.holds(two.key)  # the prefix's last page goes first


def test_a_capacity_below_one_page_is_refused() -> None:
    """D11: pages are of one size, so what could never hold one is refused at the start, with both numbers."""
    with pytest.raises(ConfigError, match="10000000 bytes holds no page: one takes 12000000 bytes"):
        RamTier(10_000_000, 12_000_000)
    with pytest.raises(ConfigError, match="holds no page"):
        RamTier(PAGE_BYTES, PAGE_BYTES)


_FILLED = """
import sys
import numpy as np
from pagetrie.kv.tiers.ram import RamTier
from tests.kv.tiers.pages import chain

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

capacity, size = int(sys.argv[1]), int(sys.argv[2])
refs = chain(3 * capacity // size, size=1)
page = np.ones(size, np.uint8)
before = resident()
tier = RamTier(capacity, size)
for ref in refs:
    assert tier.put([(ref, page)]) == 1
assert tier.stats.pages > 0.6 * capacity // size and tier.stats.evicted_pages > capacity // size
print(resident() - before)
"""


@pytest.mark.parametrize(("capacity", "size"), [(10_000_000, 4_000_000), (12_000_000, 1_000)])
def test_a_cap_counts_every_byte(capacity: int, size: int) -> None:
    """D11: three times as much as the cap holds, in large and in small pages: memory grows by the cap and no more."""
    command = [sys.executable, "-c", _FILLED, str(capacity), str(size)]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 0.6 * capacity < grown < capacity + 2_000_000
