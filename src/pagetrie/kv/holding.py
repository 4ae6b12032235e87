"""How much of the pages that leases hold is used, and shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagetrie.kv.interface import CacheLease


@dataclass(frozen=True, slots=True)
class Holding:
    """Pages that leases hold at one moment, each page counted once however many share it.

    Attributes:
        leases: leases that hold pages.
        pages: distinct pages held.
        slots: token slots in them.
        used: slots that hold a token's keys and values.
        references: entries of all page tables: the pages that would be held if none were shared.
        tokens: tokens computed, over all leases.
    """

    leases: int
    pages: int
    slots: int
    used: int
    references: int
    tokens: int


def measure(leases: Sequence[CacheLease], page_size: int) -> Holding:
    """Count what these leases hold now."""
    distinct: set[int] = set()
    # Only a lease's last pages can have room: page -> slots used.
    partial: dict[int, int] = {}
    references = tokens = 0
    for lease in leases:
        pages, computed = lease.pages, lease.computed
        distinct.update(pages)
        references += len(pages)
        tokens += computed
        full = computed // page_size
        for number in range(full, len(pages)):
            used = max(0, computed - number * page_size)
            partial[pages[number]] = max(partial.get(pages[number], 0), used)
    return Holding(
        leases=sum(1 for lease in leases if lease.pages),
        pages=len(distinct),
        slots=len(distinct) * page_size,
        used=(len(distinct) - len(partial)) * page_size + sum(partial.values()),
        references=references,
        tokens=tokens,
    )
