"""What the scheduler may ask of a cache: four verbs on leases, and counts.

Two managers stand behind it: ``CacheManager`` (paged, shared) and ``ContiguousCacheManager`` (the baseline the field
came from).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pagetrie.kv.diagnosis import Diagnosis
from pagetrie.kv.eviction.policy import RequestKind
from pagetrie.kv.shares import Allowance, OwnedPages
from pagetrie.kv.tiers.interface import TierStats

if TYPE_CHECKING:
    from pagetrie.kv.picture import EdgeText, Numbers, PageOwner, Picture


class PendingPage:
    """A page that a running lease is about to compute. ``done`` turns true when it is published or given up."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Pages by state, and what has happened so far. ``free + active + cached + loading == total`` at all times.

    Attributes:
        active_pages: held by a lease.
        cached_pages: held by none, in the index, evictable.
        loading_pages: being filled from a tier.
        evicted_pages, copied_pages: counts since start.
        pinned_pages: those of the active pages that a hold keeps.
    """

    total_pages: int
    free_pages: int
    active_pages: int
    cached_pages: int
    evicted_pages: int
    copied_pages: int
    pinned_pages: int = 0
    loading_pages: int = 0


@dataclass(frozen=True, slots=True)
class ResetReport:
    """What a reset did: pages freed at once, and pages that stay with running requests until these end.

    The latter are forgotten too: no later request hits them.
    """

    freed_pages: int
    busy_pages: int


class CacheLease(Protocol):
    """A sequence's hold on its pages."""

    holder: str
    """Whom it is for, in words of whoever opened it; what it evicts is put down to that name."""
    ttl: float | None
    """Seconds, from its end on, for which its prefix should stay cached: a hint to the eviction policy."""
    kind: RequestKind
    """Of its request; for the eviction policy, too."""
    rejoin: int
    """With so many tokens computed it is to be reopened: what follows comes from a tier. 0: nothing does."""
    coming: int
    """Pages that it needs and that are on their way from a tier: it won't have to take them."""

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are in the pages (after the step that runs the pending copies)."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Tokens that were there when the lease was opened."""
        ...

    @property
    def pages(self) -> list[int]:
        """The page table: physical page of each logical page."""
        ...

    @property
    def awaits(self) -> PendingPage | None:
        """At opening: the very next page that this lease would compute is being computed by another one."""
        ...

    @property
    def closed(self) -> bool:
        """Everything was given back."""
        ...

    def extend(self, count: int) -> int:
        """Make room for ``count`` tokens past the computed ones, evicting cached pages if needed.

        All or nothing: returns 0, or the number of pages that are missing, having taken none. In a pool so short that
        the page of a partial hit is itself needed, that hit is given up and ``computed`` falls to the page's start;
        the room asked for (up to the old ``computed + count``) is the same.
        """
        ...

    def append(self, tokens: Sequence[int]) -> None:
        """Make tokens known that follow those given at opening (generated ones)."""
        ...

    def commit(self, count: int) -> None:
        """The next ``count`` tokens are now computed: publish the pages they fill."""
        ...

    def advance(self, token: int) -> None:
        """``commit(1)``, then ``append((token,))``: what a decode step does."""
        ...

    def sole_pages(self, siblings: Sequence[CacheLease] = ()) -> int:
        """Pages that closing it and its siblings would make available: held by these leases and no other."""
        ...

    def reopen(self) -> CacheLease:
        """At ``rejoin`` and nothing computed since: the lease to go on with, which has what has been loaded meanwhile.

        This one is closed then. If the new one ``awaits`` more, it is to be reopened when that is done.
        """
        ...

    def fork(self) -> CacheLease:
        """A second lease on the same tokens and pages. Takes no page; the first to write a shared page copies it."""
        ...

    def close(self, *, publish_tail: bool = True) -> None:
        """Give everything back; what was published stays cached. Idempotent, and safe at any moment.

        ``publish_tail=False`` keeps the last, partly filled page out of the index: its content is in doubt.
        """
        ...


class CacheHold(Protocol):
    """A stored prefix that eviction leaves alone until it's released. See ``pagetrie.kv.holds.Hold``."""

    tokens: int
    pages: list[int]
    released: bool

    def fork(self) -> CacheHold: ...

    def touch(self) -> None: ...

    def release(self) -> None: ...


@dataclass(slots=True)
class TransferStats:
    """Counts since start.

    Attributes:
        copied_bytes: copied out of the pool on the step's thread.
        loads, loaded_pages: loads begun; pages that came back.
        meeting_loads: of those begun, loads of last pages while the first ones are computed.
        declined_loads: not begun, because computing was estimated to be faster.
        late_loads: given up at their deadline, or before it for the pages that they held.
        failed_loads: ended early because a tier didn't deliver what it seemed to have.
    """

    copied_bytes: int = 0
    loads: int = 0
    loaded_pages: int = 0
    meeting_loads: int = 0
    declined_loads: int = 0
    late_loads: int = 0
    failed_loads: int = 0


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The tiers by name, fastest first, and what moved between them and the pool."""

    tiers: Mapping[str, TierStats]
    transfers: TransferStats


class PageTransfers(Protocol):
    """What moves pages between the pool and the tiers below it, as far as the engine has to know."""

    @property
    def loading_pages(self) -> int:
        """Pages that no one can have before a load has ended."""
        ...

    def settle(self) -> None:
        """Take in what has arrived, give up what is late. Called between two steps."""
        ...

    def give_way(self) -> bool:
        """Give up the load that began last, for its pages; False if no load's pages can be had now."""
        ...

    def has_news(self) -> bool:
        """Whether ``settle`` has something to do now."""
        ...

    def next_deadline(self) -> float | None:
        """When it will have at the latest, in seconds of the clock; None if nothing is on its way."""
        ...

    def set_waker(self, waker: Callable[[], None]) -> None:
        """What to call, from any thread, once ``has_news`` is true."""
        ...

    def note_step(self, computes: bool) -> None:
        """A step begins that computes something, or one that only waits: then loads may have the cores."""
        ...

    def note_prefill(self, tokens: int, attended: int, seconds: float) -> None:
        """A step computed so many prompt tokens in that time: what loading has to compete with.

        Args:
            attended: positions that they attended to, together.
        """
        ...

    def claim(self, pages: Sequence[int]) -> dict[str, int]:
        """Of these pages, how many came from which tier and are used for the first time since."""
        ...

    def report(self) -> TransferReport:
        """Everything in numbers. May be called from any thread."""
        ...

    def close(self) -> None:
        """Write what tiers lack, for a bounded time, and end. Idempotent."""
        ...


class KVCache(Protocol):
    """The only door to the cache."""

    num_pages: int
    page_size: int
    hold_limit: int
    """Most pages that holds may pin together; 0 where nothing can be held."""
    shares: bool
    """Whether requests share stored prefixes."""

    def open(
        self, tokens: Sequence[int], namespace: bytes = b"", *, lookup: bool = True, publish: bool = True
    ) -> CacheLease:
        """Match the longest stored prefix of ``tokens`` and pin it, in one act. Takes no page yet.

        At least one token is always left to compute. ``lookup=False`` matches nothing, ``publish=False`` stores
        nothing.
        """
        ...

    def hold(self, tokens: Sequence[int], namespace: bytes = b"") -> CacheHold:
        """Keep the longest stored prefix of ``tokens`` from being evicted. Takes no page.

        Raises:
            HoldLimitError: its owner would pin more than it may, all together more than ``hold_limit`` pages, or
                others' floors would be stood on.
        """
        ...

    def give_up_hold(self, namespace: bytes = b"") -> bool:
        """Release a hold for a sequence of this namespace that can't run otherwise. False if none keeps pages from it.

        The least recently used of its owner's, else of an owner's that has more than its floor.
        """
        ...

    def allow(self, allowances: Mapping[bytes, Allowance]) -> None:
        """How much of the pool, and of the tiers below it, each owner of namespaces may keep; see ``shares``.

        Args:
            allowances: by owner (``owner_id``). Who isn't named is promised and forbidden nothing.

        Raises:
            ValueError: more is promised than there is.
        """
        ...

    def drop_owner(self, owner: bytes) -> None:
        """Forget all pages of an owner that has no lease any more, in the pool and the tiers that are ours alone."""
        ...

    def available_to(self, namespace: bytes) -> int:
        """Pages that a lease of this namespace could get now: ``available_pages`` less what is kept for others."""
        ...

    def reach(self, namespace: bytes) -> int:
        """Pages that a lease of this namespace can get at most, when nothing else runs. May be asked by any thread."""
        ...

    def pages_beyond_floor(self, namespace: bytes) -> int:
        """Pages in use of this namespace's owner that others could have if it let go of all."""
        ...

    def pin_limit(self, namespace: bytes) -> int:
        """Most pages that this namespace's owner may hold."""
        ...

    def stored_tokens(self, tokens: Sequence[int], namespace: bytes = b"") -> int:
        """How many leading ``tokens`` are stored now, in whole pages. Pins nothing and counts as no use: a hint."""
        ...

    def diagnose(
        self, tokens: Sequence[int], namespace: bytes = b"", others: Mapping[str, bytes] | None = None
    ) -> Diagnosis | None:
        """Where these tokens leave what is stored, and why; None where nothing is shared. Pins nothing.

        ``others``: further namespaces to look in, by any name.
        """
        ...

    def tree_size(self) -> tuple[int, int, int, int]:
        """Namespaces, edges, edges without further ones and tokens that are stored. Walks the whole tree."""
        ...

    def owned_pages(self) -> dict[bytes, OwnedPages]:
        """How many pages each owner of namespaces has."""
        ...

    def declare_public(self, tokens: Sequence[int], namespace: bytes) -> int:
        """Make a prefix public: all namespaces share its whole pages, whose namespace is this one.

        What follows them stays private. Returns their number; 0 if it has none, or if nothing is shared here.
        """
        ...

    def withdraw_public(self, tokens: Sequence[int], namespace: bytes) -> None:
        """Undo ``declare_public`` for what is opened from now on."""
        ...

    def picture(
        self,
        leases: Sequence[tuple[CacheLease, bytes]],
        owner_of: Callable[[bytes], PageOwner],
        numbers: Numbers,
        limit: int,
    ) -> Picture:
        """Draw the cache as it is now.

        Args:
            leases: of running sequences, with their namespaces.
            owner_of: whose pages are in a namespace.
            numbers: the same from picture to picture.
            limit: most edges of the tree to show.
        """
        ...

    def texts(self, wanted: Callable[[bytes], bool], numbers: Numbers, budget: int) -> tuple[list[EdgeText], bool]:
        """Edges of wanted namespaces, parents first, up to ``budget`` tokens; and whether these are all."""
        ...

    @property
    def transfers(self) -> PageTransfers | None:
        """What moves pages to and from tiers; None if there are none."""
        ...

    @property
    def available_pages(self) -> int:
        """Pages that ``extend`` could hand out now: free and cached ones."""
        ...

    def pages_for(self, tokens: int) -> int:
        """Pages that a lease of this many tokens holds."""
        ...

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) pages to copy, in order, before anything of the next step is written."""
        ...

    def stats(self) -> CacheStats: ...

    def reset(self) -> ResetReport: ...

    def recount(self) -> dict[str, tuple[int, int]]:
        """Derive every counter anew from the pages themselves; returns those that were off: name -> (was, is now)."""
        ...

    def check(self) -> None:
        """Recount everything by brute force; raise AssertionError on any disagreement (for tests)."""
        ...
