"""Which decode tokens of a step attend to which pages together.

A step's page tables form a trie: sequences that share a prefix have equal first entries. Each long enough run that
several hold becomes one part that reads it once for all of them; the rest of every table is its owner's alone, and
owners with tables of similar length are put in one part, padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_WORTH_SHARING = 256
"""Tokens that a shared run must save from being read twice; below that, a part of its own costs more."""

_PART_OVERHEAD = 256
"""Padding tokens that a part may hold for free: about what the launch of another part costs."""


@dataclass(slots=True, frozen=True, eq=False)
class DecodePart:
    """Groups of decode tokens, and the pages that each group attends to.

    Attributes:
        members: [groups, size] indices into the step's decode tokens.
        tables: [groups, pages] physical pages; short ones are padded with any page of the same group.
        begins, ends: [groups] the tokens in reach, counted from the table's start.
    """

    members: Ints
    tables: Ints
    begins: Ints
    ends: Ints


@dataclass(slots=True, frozen=True)
class _Rest:
    """What of a sequence's table is left for it alone: pages ``first .. last - 1``."""

    member: int
    first: int
    last: int


def group_decodes(
    tables: Sequence[Sequence[int]], positions: Sequence[int], page_size: int, window: int | None, max_tokens: int
) -> list[DecodePart]:
    """Split the attention of decode tokens into parts.

    Every token's reach is covered exactly once: by runs it shares, from the trie's root on, then by its own part,
    which comes last. Shared runs hold only pages that are full for all who share them. A sequence longer than the
    sliding window shares nothing, as the window cuts it off at its own place.

    Args:
        tables: page tables; only the pages that hold positions ``0 .. positions[i]`` matter.
        positions: each token's position; its key is stored already, in a page that no other sequence writes.
        page_size: tokens in a page.
        window: tokens in reach with sliding-window attention (the token's own included), or None.
        max_tokens: the most tokens, padding included, that a part of several groups may hold.

    Returns:
        Shared runs, those nearer to the root first, then parts of groups of one.
    """
    count = len(positions)
    ends = np.asarray(positions, dtype=np.int64) + 1
    lengths = -(-ends // page_size)
    begins = np.zeros(count, np.int64) if window is None else np.maximum(0, ends - window)
    firsts = begins // page_size
    shareable = np.where(begins > 0, 0, (ends - 1) // page_size)
    # Entries that can't be shared are made unique, so that comparing columns is all that is needed.
    matrix = np.empty((count, int(shareable.max(initial=0)) + 1), np.int64)
    matrix[:] = -1 - np.arange(count)[:, None]
    for member, n in enumerate(shareable):
        matrix[member, :n] = tables[member][:n]

    parts: list[DecodePart] = []
    rests: list[_Rest] = []

    def descend(members: Ints, first: int, depth: int) -> None:
        """Handle sequences whose tables agree up to ``depth`` and are covered up to ``first``."""
        column = matrix[members, depth]
        for page in dict.fromkeys(column.tolist()):
            same = members[column == page]
            if len(same) == 1:
                member = int(same[0])
                rests.append(_Rest(member, max(first, int(firsts[member])), int(lengths[member])))
                continue
            agree = (matrix[same, depth:] == matrix[same[0], depth:]).all(axis=0)
            end = depth + int(agree.argmin())  # the last column never agrees
            covered = first
            if (len(same) - 1) * (end - first) * page_size >= _WORTH_SHARING:
                table = matrix[same[:1], first:end]
                reach = np.array([(end - first) * page_size])
                parts.append(DecodePart(same[None], table, np.zeros(1, np.int64), reach))
                covered = end
            descend(same, covered, end)

    if count:
        descend(np.arange(count), 0, 0)
    for bucket in _buckets(rests, page_size, max_tokens):
        members = np.array([rest.member for rest in bucket])
        width = max(rest.last - rest.first for rest in bucket)
        padded = [
            list(tables[r.member][r.first : r.last]) + [tables[r.member][r.first]] * (width - r.last + r.first)
            for r in bucket
        ]
        offsets = np.array([rest.first for rest in bucket]) * page_size
        parts.append(
            DecodePart(
                members[:, None],
                np.array(padded, np.int64),
                np.maximum(begins[members] - offsets, 0),
                ends[members] - offsets,
            )
        )
    return parts


def _buckets(rests: list[_Rest], page_size: int, max_tokens: int) -> list[list[_Rest]]:
    """Put rests of similar length together: padding stays under a quarter of a bucket or ``_PART_OVERHEAD``."""
    buckets: list[list[_Rest]] = []
    held = 0
    for rest in sorted(rests, key=lambda r: (r.first - r.last, r.member)):
        pages = rest.last - rest.first
        if buckets:
            longest = buckets[-1][0].last - buckets[-1][0].first
            total = longest * (len(buckets[-1]) + 1) * page_size
            padding = total - (held + pages) * page_size
            if total <= max_tokens and padding <= max(total // 4, _PART_OVERHEAD):
                buckets[-1].append(rest)
                held += pages
                continue
        buckets.append([rest])
        held = pages
    return buckets
