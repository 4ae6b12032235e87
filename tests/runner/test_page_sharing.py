"""Every decode token reaches exactly its own tokens, each once, and shared pages are read once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pagetrie.runner.page_sharing import DecodePart, group_decodes


def reach(parts: list[DecodePart], page_size: int) -> dict[int, Counter[tuple[int, int]]]:
    """Which (page, slot) each decode token attends to, and how often."""
    seen: dict[int, Counter[tuple[int, int]]] = {}
    for part in parts:
        for group, members in enumerate(part.members.tolist()):
            for at in range(int(part.begins[group]), int(part.ends[group])):
                slot = int(part.tables[group, at // page_size]), at % page_size
                for member in members:
                    seen.setdefault(member, Counter())[slot] += 1
    return seen


@pytest.mark.parametrize("seed", range(40))
def test_reach_is_exact(seed: int) -> None:
    rng = random.Random(seed)
    page_size = rng.choice((1, 4, 16))
    window = rng.choice((None, None, 64, 700))
    fresh = iter(range(1, 10**6))
    trunks: list[list[int]] = [[]]
    for _ in range(6):  # a random tree of runs of pages
        stem = rng.choice(trunks)
        trunks.append(stem + [next(fresh) for _ in range(rng.randint(1, 600 // page_size))])
    tables, positions = [], []
    for _ in range(rng.randint(1, 12)):
        trunk = rng.choice(trunks)
        shared = trunk[: rng.randint(0, len(trunk))]
        extra = rng.randint(0, 40)
        positions.append(len(shared) * page_size + extra)
        tables.append(shared + [next(fresh) for _ in range(extra // page_size + 1 + rng.randint(0, 2))])
    parts = group_decodes(tables, positions, page_size, window, max_tokens=3000)
    seen = reach(parts, page_size)
    for member, (table, position) in enumerate(zip(tables, positions, strict=True)):
        first = 0 if window is None else max(0, position - window + 1)
        wanted = [(table[at // page_size], at % page_size) for at in range(first, position + 1)]
        assert seen[member] == Counter(wanted)
    for part in parts:
        held = part.tables.size * page_size
        assert len(part.members) == 1 or held <= 3000
        used = int((part.ends - part.begins).sum())
        assert held - used <= max(held // 4, 256) + 2 * page_size * len(part.members)


def test_common_pages_are_read_once() -> None:
    common = list(range(64))
    tables = [[*common, 100 + i] for i in range(50)]
    parts = group_decodes(tables, [64 * 16 + 3] * 50, 16, None, max_tokens=10**6)
    assert [part.members.shape for part in parts] == [(1, 50), (50, 1)]
    assert parts[0].tables.tolist() == [common]
    assert sum(part.tables.size for part in parts) == 64 + 50


def test_a_page_not_yet_full_is_not_shared() -> None:
    """Two forks at different positions still in one common page: its unwritten slots differ for each."""
    tables = [[*range(64), 7000], [*range(64), 7001]]
    parts = group_decodes(tables, [64 * 16, 63 * 16 + 5], 16, None, max_tokens=10**6)
    shared = [part for part in parts if part.members.shape[1] == 2]
    assert [part.tables.tolist() for part in shared] == [[list(range(63))]]


def test_short_common_runs_are_not_worth_a_part() -> None:
    tables = [[1, 10], [1, 11]]
    parts = group_decodes(tables, [20, 21], 16, None, max_tokens=10**6)
    assert [part.members.shape for part in parts] == [(2, 1)]


def test_one_long_sequence_does_not_pad_the_short_ones() -> None:
    tables = [list(range(500)), *([1000 + 20 * i + j for j in range(19)] for i in range(16))]
    parts = group_decodes(tables, [7990] + [300] * 16, 16, None, max_tokens=10**6)
    assert sum(part.tables.size for part in parts) == 500 + 16 * 19


def test_no_decodes() -> None:
    assert group_decodes([], [], 16, None, max_tokens=100) == []
