"""A beam search as the scheduler sees it: one sequence with one lease, which is a group of leases.

All beams have one length, so a step computes the next token of each and the group is served, preempted and resumed as
a whole: it has pages for all of its beams, or none. A preempted group is *folded* to what its beams have in common;
that is opened like any prompt, and when it is computed the beams are forked from it again.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagetrie.engine.beam_search import Beam, BeamSearch, common_prefix
from pagetrie.engine.runner import SequenceResult
from pagetrie.kv import CacheLease, PendingPage


class GroupLease:
    """Leases of one length that grow and end together (``CacheLease``).

    ``pages`` is the first one's page table. When ``extend`` says that pages are missing, it may have given some leases
    more room than others; the next call uses it, or ``close`` gives it back.
    """

    def __init__(self, leases: list[CacheLease]) -> None:
        self.leases = leases
        self.holder = leases[0].holder
        self.ttl = leases[0].ttl
        self.kind = leases[0].kind
        self.awaits: PendingPage | None = None
        self.rejoin = self.coming = 0

    @property
    def computed(self) -> int:
        return self.leases[0].computed

    @property
    def cached_tokens(self) -> int:
        return self.leases[0].cached_tokens

    @property
    def pages(self) -> list[int]:
        return self.leases[0].pages

    @property
    def closed(self) -> bool:
        return self.leases[0].closed

    def extend(self, count: int) -> int:
        for lease in self.leases:
            if missing := lease.extend(count):
                return missing
        return 0

    def append(self, tokens: Sequence[int]) -> None:
        for lease in self.leases:
            lease.append(tokens)

    def advance(self, token: int) -> None:
        for lease in self.leases:
            lease.advance(token)

    def commit(self, count: int) -> None:
        for lease in self.leases:
            lease.commit(count)

    def sole_pages(self, siblings: Sequence[CacheLease] = ()) -> int:
        first, *others = self.leases
        return first.sole_pages([*others, *siblings])

    def reopen(self) -> GroupLease:
        """Nothing is on its way: the prompt has been computed."""
        return self

    def fork(self) -> GroupLease:
        return GroupLease([lease.fork() for lease in self.leases])

    def close(self, *, publish_tail: bool = True) -> None:
        for lease in self.leases:
            lease.close(publish_tail=publish_tail)


class BeamGroup:
    """The beams of one request.

    Args:
        search: the search.
        prompt: what all beams begin with.
        page_size: tokens per page.

    Attributes:
        fork_pages: pages that the beams will take when they are forked, besides those of what they have in common.
        max_len: tokens that need as many pages as all beams may come to hold.
    """

    def __init__(self, search: BeamSearch, prompt: Sequence[int], page_size: int) -> None:
        self.search = search
        self._prompt = prompt
        self._page_size = page_size
        self.fork_pages = search.width - 1
        self.max_len = len(prompt) + search.width * (search.max_tokens + page_size)

    def ids(self, beam: Beam, start: int, end: int) -> list[int]:
        """Tokens ``start..end-1`` of a beam, prompt included."""
        length = len(self._prompt)
        prompt = self._prompt[start : min(end, length)] if start < length else ()
        return [*prompt, *beam.tokens[max(0, start - length) : max(0, end - length)]]

    def take(self, lease: CacheLease, results: Sequence[SequenceResult]) -> CacheLease:
        """Everything known of the beams is computed: choose the next ones and give them leases.

        Returns:
            The lease to go on with; the old one's pages that no beam stands on any more are given back. Once the search
            is done, the old lease.
        """
        old = lease.leases if isinstance(lease, GroupLease) else [lease]
        if not results[0].samples:  # folded: the beams are known already
            return self._unfold(lease)
        parents = self.search.advance([result.samples[0].top for result in results])
        if self.search.done:
            return lease
        # Fork before anything is appended. One child of each parent takes over its lease.
        heirs: set[int] = set()
        leases: list[CacheLease] = []
        for place in parents:
            leases.append(old[place].fork() if place in heirs else old[place])
            heirs.add(place)
        for place, unused in enumerate(old):
            if place not in heirs:
                unused.close(publish_tail=False)
        for new, beam in zip(leases, self.search.live, strict=True):
            new.append(beam.tokens[-1:])
        return GroupLease(leases)

    def fold(self) -> list[int]:
        """The group has lost its pages. Returns the tokens to compute before the beams are forked again."""
        beams, length, size = self.search.live, len(self._prompt), self._page_size
        if not beams[0].tokens:
            return self.ids(beams[0], 0, length)
        # Each beam's last token is still to be computed, so it's never part of what they have in common.
        shared = length + min(common_prefix(beam.tokens for beam in beams), len(beams[0].tokens) - 1)
        ends = -(-(length + len(beams[0].tokens) + 1) // size)
        self.fork_pages = len(beams) * (ends - shared // size) - (-(-(shared + 1) // size) - shared // size)
        return self.ids(beams[0], 0, shared)

    def _unfold(self, lease: CacheLease) -> CacheLease:
        shared = lease.computed - len(self._prompt)
        leases = [lease, *(lease.fork() for _ in self.search.live[1:])]
        for each, beam in zip(leases, self.search.live, strict=True):
            each.append(beam.tokens[shared:])
        return GroupLease(leases)
