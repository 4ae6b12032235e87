"""A sequence's page table: what it shares with the index, what is its own, and what it publishes as it grows.

Ownership, in one place: the first ``_indexed`` pages of a lease's table belong to the index and are protected by the
lease's one pin, on the node where they end; the rest are private to it (and its forks, by reference count).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagetrie.kv.eviction import RequestKind, Use
from pagetrie.kv.interface import CacheLease, PendingPage
from pagetrie.kv.page_tree import Match, Node
from pagetrie.kv.shares import Share
from pagetrie.kv.tokens import TOKEN_BYTES, pack_tokens

if TYPE_CHECKING:
    from pagetrie.kv.manager import CacheManager


class Lease:
    """A sequence's hold on its pages (``CacheLease``). Made by ``CacheManager.open`` and ``fork``."""

    __slots__ = (
        "_announced",
        "_copy_pending",
        "_indexed",
        "_manager",
        "_namespace",
        "_node",
        "_partial",
        "_private",
        "_prompt_tokens",
        "_public_pages",
        "_publish",
        "_publish_at",
        "_room",
        "_root",
        "_tokens",
        "_trunk",
        "awaits",
        "cached_tokens",
        "closed",
        "coming",
        "computed",
        "holder",
        "kind",
        "pages",
        "rejoin",
        "share",
        "ttl",
    )

    def __init__(
        self, manager: CacheManager, share: Share, tokens: array[int], root: Node, node: Node, *, publish: bool
    ) -> None:
        self._manager = manager
        self.share = share
        self._tokens = tokens
        self._root = root
        self._node = node
        self._publish = publish
        self._indexed = 0
        # With so many tokens computed there may be a page to publish.
        self._publish_at = 0
        self._prompt_tokens = len(tokens)
        # The first so many pages are public; past them stands the pinned node at their end, and the namespace changes.
        self._public_pages = 0
        self._namespace = self._private = b""
        self._trunk: Node | None = None
        # A partial hit: the page to copy on the first write, and the node pinned for it.
        self._partial: tuple[int, Node] | None = None
        # Positions below this can be written without another thought; 0 while a shared page must be checked for.
        self._room = 0
        # The last page is the target of a copy that no step has run yet.
        self._copy_pending = False
        self._announced: tuple[tuple[Node, bytes], PendingPage] | None = None
        self.pages: list[int] = []
        self.computed = 0
        self.cached_tokens = 0
        self.awaits: PendingPage | None = None
        self.rejoin = self.coming = 0
        self.closed = False
        self.holder = ""
        self.ttl: float | None = None
        self.kind = RequestKind.UNKNOWN

    def __len__(self) -> int:
        """Known tokens."""
        return len(self._tokens)

    def _stand_on(self, match: Match) -> None:
        """Take over what a match says of a public prefix."""
        self._public_pages, self._private, self._trunk = match.public_pages, match.private, match.trunk
        if self._trunk is not None:
            self._manager.index.pin(self._trunk)

    def _beyond_trunk(self, pages: list[int], tokens: bytes) -> tuple[list[int], bytes]:
        """Of pages and tokens from the start, those of the namespace that the lease stands in now."""
        own = self._manager.index.page_bytes * self._public_pages
        if self._trunk is not None:
            return pages[self._public_pages :], tokens[own:]
        # One token more, since the last one is always left to compute.
        return pages, tokens[: own + TOKEN_BYTES] if self._public_pages else tokens

    def extend(self, count: int) -> int:
        end = self.computed + count
        if end <= self._room:
            return 0
        manager, pages = self._manager, self.pages
        page_size = manager.page_size
        tail = self.computed // page_size
        # A page that others hold too is copied before it is written.
        shared = tail < len(pages) and manager.pool.references[pages[tail]] > 1
        needed = max(0, -(-end // page_size) - len(pages)) + shared
        if needed:
            missing = needed - manager.index.shares.available(self.share)
            if missing > 0 and self._partial is not None:
                missing -= self._give_up_partial(missing)
            if missing > 0:
                return missing
            new = manager._take(needed, self.share, self)
            if shared:
                copy = new.pop()
                manager._copy(pages[tail], copy)
                manager.pool.release((pages[tail],))
                pages[tail] = copy
                self._copy_pending = True
            elif self._partial is not None:
                source, owner = self._partial
                manager._copy(source, new[0])
                manager.index.unpin(owner)
                manager._trim(self.share)
                self._partial = None
                self._copy_pending = True
            pages += new
        self._room = len(pages) * page_size
        return 0

    def _give_up_partial(self, missing: int) -> int:
        """Forgo the partial hit if the page it would be copied from is all that is missing; else keep it.

        Returns the pages that this gains or would gain: 1, or 0 if someone else holds that page too.
        """
        assert self._partial is not None
        manager, owner = self._manager, self._partial[1]
        before = manager.index.shares.available(self.share)
        manager.index.unpin(owner)
        gained = manager.index.shares.available(self.share) - before
        if gained < missing:
            manager.index.pin(owner)
        else:
            self._partial = None
            self.computed = self.cached_tokens = len(self.pages) * manager.page_size
        return gained

    def append(self, tokens: Sequence[int]) -> None:
        self._tokens += array("I", tokens)  # all or, if one is no u32, none

    def commit(self, count: int) -> None:
        self.computed += count
        self._copy_pending = False
        if self.computed >= self._publish_at:
            self._publish_pages()

    def advance(self, token: int) -> None:
        computed = self.computed = self.computed + 1
        self._copy_pending = False
        if computed >= self._publish_at:
            self._publish_pages()
        self._tokens.append(token)

    def _publish_pages(self) -> None:
        """Publish the pages that are full, if there are any."""
        size = self._manager.page_size
        full = self.computed // size
        if self._publish and full > self._indexed:
            self._publish_up_to(full)
        self._publish_at = (full + 1) * size

    def _publish_up_to(self, full: int) -> None:
        if self._is_forgotten():
            return
        if self._indexed < self._public_pages:
            self._publish_run(min(full, self._public_pages))
            if self._indexed == self._public_pages:
                self._leave_trunk()
        if self._publish and full > self._indexed:
            self._publish_run(full)
        self._manager._announce(self)

    def _publish_run(self, full: int) -> None:
        """Publish pages up to number ``full`` in the namespace that the lease stands in."""
        manager, index, first = self._manager, self._manager.index, self._indexed
        mine = self.pages[first:full]
        tokens = pack_tokens(self._tokens[first * manager.page_size : full * manager.page_size])
        if not len(tokens) == len(mine) * index.page_bytes == (full - first) * index.page_bytes:
            # Published all the same, others would hit pages that hold something else.
            raise ValueError(
                f"{self.computed} tokens are committed, but only {len(self)} are known and {len(self.pages)} pages held"
            )
        node, kept = index.insert(self._node, tokens, mine)
        # Where another lease was first, switch to its pages before giving back our own.
        self.pages[first : first + len(kept)] = kept
        self._indexed += len(kept)
        manager.pool.release([own for own, page in zip(mine, kept, strict=False) if own != page])
        if manager.transfers is not None:
            begin = self._public_pages if self._trunk is not None else 0
            manager.transfers.published(self._root, self.pages[first - 1] if first > begin else None, tokens, kept)
        if node is not self._node:
            index.pin(node)
            index.unpin(self._node)
            self._node = node
        if len(kept) < len(mine):
            self._publish = False

    def _leave_trunk(self) -> None:
        """All public pages are there; go on in the prompt's own namespace. The pin on the last of them stays."""
        self._trunk = self._node
        self._root = self._node = self._manager.index.root(self._private)
        self._manager.index.pin(self._node)

    def _is_forgotten(self) -> bool:
        """The tree this lease stands on was dropped by a reset: publish nothing more."""
        if self._root.dead:
            self._publish = False
            self._manager._announce(self)
        return self._root.dead

    def reopen(self) -> Lease:
        """See ``CacheLease.reopen``."""
        manager, index = self._manager, self._manager.index
        if self._root.dead or not self._publish:  # what is computed can't be found again
            self.rejoin, self.awaits = 0, None
            return self
        held = [node for node in (self._node, self._trunk) if node is not None]
        for node in held:  # nothing of it must go meanwhile
            index.pin(node)
        cached, self.cached_tokens = self.cached_tokens, self.computed  # for the eviction policy it is one use
        # Closed first: it announces its next page, for which the new one would wait.
        self.close()
        lease = manager.open(self._tokens, self._namespace)
        for node in held:
            index.unpin(node)
        lease.cached_tokens = cached + lease.computed - self.computed
        lease.holder, lease.ttl, lease.kind = self.holder, self.ttl, self.kind
        if lease.awaits is not None:
            lease.rejoin = lease.computed
        return lease

    def sole_pages(self, siblings: Sequence[CacheLease] = ()) -> int:
        manager = self._manager
        if siblings:
            return manager._sole_pages([self, *(lease for lease in siblings if isinstance(lease, Lease))])
        references = manager.pool.references
        private = sum(references[page] == 1 for page in self.pages[self._indexed :])
        trunk = 0 if self._trunk is None else manager.index.solely_pinned(self._trunk, None)
        return private + trunk + manager.index.solely_pinned(self._node, self._partial and self._partial[1])

    def fork(self) -> Lease:
        manager = self._manager
        child = Lease(manager, self.share, self._tokens[:], self._root, self._node, publish=self._publish)
        child._prompt_tokens = self._prompt_tokens
        child.computed = self.computed
        child.cached_tokens = self.cached_tokens
        child.holder = self.holder
        child.ttl = self.ttl
        child.kind = self.kind
        child.pages = self.pages[: manager.pages_for(self.computed)]
        child._indexed = self._indexed
        child._copy_pending = self._copy_pending
        child._partial = self._partial
        child._public_pages, child._private, child._trunk = self._public_pages, self._private, self._trunk
        manager.index.pin(child._node)
        if child._trunk is not None:
            manager.index.pin(child._trunk)
        if child._partial is not None:
            manager.index.pin(child._partial[1])
        manager.pool.share(child.pages[child._indexed :])
        self._room = child._room = 0
        return child

    def close(self, *, publish_tail: bool = True) -> None:
        if self.closed:
            return
        self.closed = True
        manager, index = self._manager, self._manager.index
        manager._announce(self)
        private = self.pages[self._indexed :]
        if publish_tail and private and self._has_tail() and not self._is_forgotten():
            tokens = pack_tokens(self._tokens[self._indexed * manager.page_size : self.computed])
            if index.insert_tail(self._node, tokens, private[0]):
                del private[0]
        if self._copy_pending:
            manager._forget_copies(private)
        manager.pool.release(private)
        if self._partial is not None:
            index.unpin(self._partial[1])
            self._partial = None
        use = None
        if self.computed > self.cached_tokens:
            use = Use(self._prompt_tokens, self.cached_tokens, len(self) - self._prompt_tokens, self.ttl, self.kind)
        index.touch(self._node, use)
        if manager.transfers is not None and self._indexed and not self._root.dead:
            manager.transfers.used(self.pages[self._indexed - 1])
            if self._trunk is not None:
                manager.transfers.used(self.pages[self._public_pages - 1])
        index.unpin(self._node)
        if self._trunk is not None:
            index.touch(self._trunk, None)
            index.unpin(self._trunk)
        manager._trim(self.share)
        self.pages = []
        self._room = 0

    def _has_tail(self) -> bool:
        """The first private page holds computed tokens, is ours alone and may be published."""
        manager = self._manager
        return (
            self._publish
            and not self._copy_pending
            and self._indexed * manager.page_size < self.computed
            and manager.pool.references[self.pages[self._indexed]] == 1
        )

    def _next_page(self) -> bytes:
        """Tokens of the first page that isn't published yet; less than a page if they aren't all known."""
        size = self._manager.page_size
        return pack_tokens(self._tokens[self._indexed * size : (self._indexed + 1) * size])
