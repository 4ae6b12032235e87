"""Contexts: token ids that requests start from again and again, with a hold on their pages.

A context is its ids; the hold only saves computing them anew. Where the cache had to let go of the hold, the next use
computes what is missing and takes hold again. Everything here runs on the engine's thread.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pagetrie.engine.request import ContextUse
from pagetrie.engine.tenant import Owner, Tenant
from pagetrie.errors import HoldLimitError, InvalidRequestError
from pagetrie.kv import CacheHold, KVCache

MAX_FORKS = 128
OWNERS = 16
"""All owners of a tenant together may keep this many times what one may."""


@dataclass(slots=True, eq=False)
class Context:
    """One context.

    Attributes:
        id: unguessable; known to its owner alone.
        owner: who may use it, and whose pages it shares.
        ids: the tokens that a request on it starts with.
        ttl, expires: seconds it lives after its last use; when it ends, by the engine's clock.
        note: what its maker keeps with it (a chat's transcript); not looked at here.
        hold: its pages, as far as they are held.
        users: requests in flight on it; it doesn't expire under them.
        growing: one of them appends to it.
        version: how often it has been appended to.
        closed: deleted or expired.
    """

    id: str
    owner: Owner
    ids: list[int]
    ttl: float
    expires: float
    note: object = None
    hold: CacheHold | None = None
    users: int = 0
    growing: bool = False
    version: int = 0
    closed: bool = False

    @property
    def pages(self) -> int:
        """Pages held, shared ones included."""
        return len(self.hold.pages) if self.hold is not None else 0

    @property
    def held_tokens(self) -> int:
        """Tokens of it that are safe from eviction."""
        return self.hold.tokens if self.hold is not None and not self.hold.released else 0


class Contexts:
    """All contexts of an engine.

    Args:
        cache: where their pages are.
        namespace: the namespace of a tenant's salt.
        clock: seconds.
        new_id: makes ids, which must be unguessable.
        max_per_owner: contexts that one owner may keep.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        namespace: Callable[[str, Tenant], bytes],
        clock: Callable[[], float],
        new_id: Callable[[], str],
        max_per_owner: int,
    ) -> None:
        self._cache = cache
        self._namespace = namespace
        self._clock = clock
        self._new_id = new_id
        self._max_per_owner = max_per_owner
        self._owners: dict[tuple[str, bytes, str, bool], dict[str, Context]] = {}
        # Contexts per tenant.
        self._counts: Counter[str] = Counter()
        self._next_expiry = math.inf  # no context ends before this

    def __len__(self) -> int:
        return self._counts.total()

    def __iter__(self) -> Iterator[Context]:
        return (context for owned in self._owners.values() for context in owned.values())

    def create(self, owner: Owner, ids: list[int], *, ttl: float = math.inf, note: object = None) -> Context:
        """A context without a hold yet: it gets one by the first request on it.

        Raises:
            InvalidRequestError: 400 for what can never be held, 429 at the owner's limit.
        """
        self._refuse_over_limit(owner, 1)
        limit = self._cache.pin_limit(self._namespace("", owner.tenant))
        if not limit:
            raise InvalidRequestError(str(HoldLimitError(adds=0, pinned=0, limit=0)), code="contexts_unavailable")
        pages = self._cache.pages_for(len(ids))
        if pages > limit:
            raise InvalidRequestError(
                f"a context of {len(ids)} tokens takes {pages} pages, but all pinned prefixes together may take "
                f"{limit}",
                param="prompt",
                code="context_too_large",
            )
        return self._add(owner, ids, ttl, note, None)

    def get(self, owner: Owner, context_id: str) -> Context:
        """An owner's context, which this counts as used.

        Raises:
            InvalidRequestError: 404: there is none of that id, or not for this owner; both read the same.
        """
        self.expire()
        context = self._owners.get(owner.key, {}).get(context_id)
        if context is None:
            raise InvalidRequestError(
                f"There is no context '{context_id[:80]}'. Contexts end when they are deleted or have not been used "
                "for their time to live.",
                param="context",
                code="context_not_found",
                status=404,
            )
        self._touch(context)
        return context

    def of(self, owner: Owner) -> list[Context]:
        """An owner's contexts, oldest first. Looking at them is no use of them."""
        self.expire()
        return list(self._owners.get(owner.key, {}).values())

    def fork(self, owner: Owner, context_id: str, count: int, *, ttl: float | None = None) -> list[Context]:
        """``count`` new contexts that stand where this one stands. No page is copied, nothing is computed.

        Raises:
            InvalidRequestError: 404; 400 for a count out of range; 429 at the owner's limit.
        """
        if not 1 <= count <= MAX_FORKS:
            raise InvalidRequestError(f"n must be between 1 and {MAX_FORKS}, got {count}", param="n")
        parent = self.get(owner, context_id)
        self._refuse_over_limit(owner, count)
        return [
            self._add(
                owner,
                parent.ids,
                parent.ttl if ttl is None else ttl,
                parent.note,
                None if parent.hold is None else parent.hold.fork(),
            )
            for _ in range(count)
        ]

    def delete(self, owner: Owner, context_id: str) -> None:
        """End a context; its pages may be evicted from now on. Requests in flight on it go on.

        Raises:
            InvalidRequestError: 404.
        """
        self._close(self.get(owner, context_id))

    def drop(self, tenant: bytes) -> None:
        """End all contexts of a tenant, by its ``Tenant.owner``."""
        for context in [context for context in self if context.owner.tenant.owner == tenant]:
            self._close(context)

    def expire(self) -> None:
        """End the contexts whose time is over."""
        if self._next_expiry == math.inf or (now := self._clock()) < self._next_expiry:
            return
        for context in [c for c in self if c.expires <= now and not c.users]:
            self._close(context)
        self._next_expiry = min((c.expires for c in self if not c.users), default=math.inf)

    def seconds_to_expiry(self) -> float | None:
        """Until the next context may end, at least 0; None if none will."""
        return None if self._next_expiry == math.inf else max(0.0, self._next_expiry - self._clock())

    def seconds_left(self, context: Context) -> float:
        """Until a context ends unless it's used."""
        return max(0.0, context.expires - self._clock())

    # -- requests on contexts ----------------------------------------------------------------------------------------

    def begin(self, use: ContextUse) -> Context:
        """A request starts on a context.

        Raises:
            InvalidRequestError: 404; 409 if it appends while another one does, or after one did that it knows not of.
        """
        context = self.get(use.owner, use.id)
        if use.append:
            self.check_free(context, use.version)
            context.growing = True
        context.users += 1
        return context

    def check_free(self, context: Context, version: int) -> None:
        """Raises InvalidRequestError (409) unless a request that knows this version may append."""
        if context.growing or context.version != version:
            happens = "is appending" if context.growing else "has meanwhile appended"
            raise InvalidRequestError(
                f"Another request {happens} to context '{context.id}'; wait for it, or fork the context.",
                param="context",
                code="context_busy",
                status=409,
            )

    def end(self, context: Context, *, append: bool, ids: list[int] | None = None, note: object = None) -> None:
        """A request on a context has ended.

        Args:
            context: from ``begin``.
            append: as told to ``begin``.
            ids, note: what an appending request that got to its end makes of the context; None leaves it as it is.
        """
        context.users -= 1
        if append:
            context.growing = False
        if context.closed:
            return
        if append and ids is not None:
            held, before = context.hold, context.ids
            context.version += 1
            context.ids, context.note, context.hold = ids, note, None
            if held is not None:
                held.release()
            if not self._try_hold(context, ids):
                self._try_hold(context, before)
        else:
            self._try_hold(context, context.ids)
        self._touch(context)

    def secure(self, context: Context) -> None:
        """Take hold of a context's stored pages unless that is done.

        Raises:
            HoldLimitError: pinned pages are at their limit.
        """
        if context.hold is None or context.hold.released:
            context.hold = self._cache.hold(context.ids, self._namespace(context.owner.salt, context.owner.tenant))

    # ----------------------------------------------------------------------------------------------------------------

    def _try_hold(self, context: Context, ids: list[int]) -> bool:
        """Hold what is stored of ``ids``; at the limit of pinned pages the context lives on as its tokens alone."""
        if context.hold is not None and not context.hold.released and context.hold.tokens >= len(ids) - 1:
            return True
        try:
            hold = self._cache.hold(ids, self._namespace(context.owner.salt, context.owner.tenant))
        except HoldLimitError:
            return False
        if context.hold is not None:
            context.hold.release()
        context.hold = hold
        return True

    def _add(self, owner: Owner, ids: list[int], ttl: float, note: object, hold: CacheHold | None) -> Context:
        context = Context(self._new_id(), owner, ids, ttl, math.inf, note, hold)
        self._touch(context)
        self._owners.setdefault(owner.key, {})[context.id] = context
        self._counts[owner.tenant.name] += 1
        return context

    def _touch(self, context: Context) -> None:
        context.expires = self._clock() + context.ttl
        self._next_expiry = min(self._next_expiry, context.expires)
        if context.hold is not None:
            context.hold.touch()

    def _close(self, context: Context) -> None:
        context.closed = True
        if context.hold is not None:
            context.hold.release()
        owner = context.owner
        owned = self._owners[owner.key]
        del owned[context.id]
        if not owned:
            del self._owners[owner.key]
        self._counts[owner.tenant.name] -= 1
        if not self._counts[owner.tenant.name]:
            del self._counts[owner.tenant.name]

    def _refuse_over_limit(self, owner: Owner, more: int) -> None:
        self.expire()
        owned, limit = len(self._owners.get(owner.key, ())), self._max_per_owner
        if owned + more > limit or self._counts[owner.tenant.name] + more > OWNERS * limit:
            whose = f"you have {owned}" if owned + more > limit else f"all salts together have {OWNERS} times as many"
            raise InvalidRequestError(
                f"At most {limit} contexts may be kept and {whose}, so {more} more can't be made; delete some first.",
                code="context_limit",
                status=429,
            )
