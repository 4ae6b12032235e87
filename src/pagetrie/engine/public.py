"""Public prefixes: what the operator lets all tenants share. Everything here runs on the engine's thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

from pagetrie.errors import InvalidRequestError
from pagetrie.kv import CacheHold, KVCache
from pagetrie.kv.tokens import pack_tokens

MAX_PREFIXES = 64
"""Every prompt is compared with all of them."""


@dataclass(slots=True, eq=False)
class PublicPrefix:
    """One prefix.

    Attributes:
        id: says which, the same for the same tokens.
        ids: its tokens.
        pages: whole pages of it, which are what is shared.
        hold: keeps them from being evicted; None before they were computed.
    """

    id: str
    ids: list[int]
    pages: int
    hold: CacheHold | None = None

    @property
    def held_tokens(self) -> int:
        """Tokens of it that are stored and safe from eviction."""
        return self.hold.tokens if self.hold is not None and not self.hold.released else 0


class PublicPrefixes:
    """All of an engine's.

    Args:
        cache: where their pages are.
        namespace: of these pages.
    """

    def __init__(self, cache: KVCache, namespace: bytes) -> None:
        self._cache = cache
        self._namespace = namespace
        self._prefixes: dict[str, PublicPrefix] = {}

    def __iter__(self) -> Iterator[PublicPrefix]:
        return iter(self._prefixes.values())

    def declare(self, ids: list[int]) -> PublicPrefix:
        """Let all tenants share a prefix from now on. Its first user computes it, unless that is done before.

        Raises:
            InvalidRequestError: it holds no whole page, nothing can be shared, or there are too many.
        """
        # What is shared is whole pages; prefixes that differ only past these are one.
        whole = ids[: len(ids) // self._cache.page_size * self._cache.page_size]
        name = f"pub-{blake3(pack_tokens(whole)).hexdigest(12)}"
        known = self._prefixes.get(name)
        if known is not None:
            return known
        if len(self._prefixes) >= MAX_PREFIXES:
            raise InvalidRequestError(
                f"at most {MAX_PREFIXES} public prefixes may be kept; withdraw one first", code="public_prefix_limit"
            )
        pages = self._cache.declare_public(ids, self._namespace)
        if not pages:
            raise InvalidRequestError(
                f"a public prefix needs a page of {self._cache.page_size} tokens and has {len(ids)}"
                if self._cache.shares
                else "nothing is shared here: that takes the paged layout and a prefix index",
                param="prompt",
            )
        prefix = self._prefixes[name] = PublicPrefix(name, ids, pages)
        return prefix

    def prompt(self, prefix: PublicPrefix) -> list[int]:
        """What to compute so that all of the prefix's pages are stored: one token must come after them."""
        return prefix.ids if len(prefix.ids) > prefix.pages * self._cache.page_size else [*prefix.ids, prefix.ids[-1]]

    def secure(self, prefix: PublicPrefix) -> None:
        """Take hold of its stored pages, unless that is done.

        Raises:
            HoldLimitError: pinned pages are at their limit.
        """
        if self._prefixes.get(prefix.id) is not prefix:  # withdrawn while it was computed
            return
        if prefix.held_tokens < prefix.pages * self._cache.page_size:
            hold = self._cache.hold(prefix.ids[: prefix.pages * self._cache.page_size], self._namespace)
            if prefix.hold is not None:
                prefix.hold.release()
            prefix.hold = hold

    def get(self, name: str) -> PublicPrefix:
        """Raises InvalidRequestError (404)."""
        prefix = self._prefixes.get(name)
        if prefix is None:
            raise InvalidRequestError(
                f"There is no public prefix '{name[:80]}'.", code="public_prefix_not_found", status=404
            )
        return prefix

    def withdraw(self, name: str) -> None:
        """Share it no more. What runs goes on. Raises InvalidRequestError (404)."""
        prefix = self.get(name)
        self._cache.withdraw_public(prefix.ids, self._namespace)
        if prefix.hold is not None:
            prefix.hold.release()
        del self._prefixes[name]
