"""How well memory is used at one moment: what running sequences hold, share and waste, and what the tree stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagetrie.kv import CacheLease, KVCache
from pagetrie.kv.holding import Holding, measure
from pagetrie.kv.shares import OwnedPages


@dataclass(frozen=True, slots=True)
class TreeSize:
    """The prefix tree in numbers: roots with anything under them, edges, edges without further ones, tokens."""

    namespaces: int = 0
    nodes: int = 0
    leaves: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """One moment's numbers.

    Attributes:
        holding: what the running sequences hold.
        reserved: token slots that contiguous reservations of the longest sequence would take for them.
        tree: what is stored.
        owners: what each owner of namespaces has of the pool.
    """

    holding: Holding
    reserved: int
    tree: TreeSize
    owners: Mapping[bytes, OwnedPages]

    @property
    def unused(self) -> int:
        """Slots in held pages without a token."""
        return self.holding.slots - self.holding.used

    @property
    def unused_if_reserved(self) -> int:
        """Slots that contiguous reservations would leave without a token."""
        return max(0, self.reserved - self.holding.tokens)


def measure_usage(
    cache: KVCache, leases: Sequence[CacheLease], max_model_len: int, tree: TreeSize | None = None
) -> CacheUsage:
    """Measure now.

    Args:
        cache: the cache.
        leases: those of the running sequences.
        max_model_len: what a reservation would have to hold, in tokens.
        tree: what is stored, if that is known; else a walk over the tree tells.
    """
    holding = measure(leases, cache.page_size)
    pages = -(-max_model_len // cache.page_size)
    reserved = holding.leases * pages * cache.page_size
    return CacheUsage(holding, reserved, tree or TreeSize(*cache.tree_size()), cache.owned_pages())
