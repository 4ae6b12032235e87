"""What is on its way between the pool and the tiers: loads from the pool's side, and questions to a shared store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from pagetrie.kv.interface import PendingPage
from pagetrie.kv.page_tree import Node
from pagetrie.kv.tiers.load import Load

_REMEMBERED = 8192


class Ahead(NamedTuple):
    """What stands ahead of a match.

    Attributes:
        awaits: what to wait for before computing on.
        rejoin: tokens, from the tree's root, after which what follows is on its way: who has computed so far looks
            again. 0 for none.
        coming: pages on their way, from there on.
    """

    awaits: PendingPage | None = None
    rejoin: int = 0
    coming: int = 0


class Flight:
    """A load from the pool's side: where its next page will hang, who waits, until when.

    Attributes:
        reader: the tier whose thread fills it.
        start: tokens before its first page.
        path: these tokens (u32 LE) as long as some of them are still being computed: until then nothing of the load can
            be published.
        grown: how many bytes of the path are in the tree.
        most: seconds for which the path may stand still before the load is given up.
        deadline: when it is looked at: it goes on if it is worth that. latest: when it ends in any case.
        seen: how many pages had arrived when it was last looked at. queued: it was behind another one.
    """

    def __init__(
        self,
        load: Load,
        reader: str,
        root: Node,
        node: Node,
        start: int,
        path: bytes,
        *,
        started: float,
        deadline: float,
        latest: float,
    ) -> None:
        self.load = load
        self.reader = reader
        self.root = root
        self.node = node
        self.start = start
        self.path = path
        self.grown = 0
        self.most = latest - started
        self.started = started
        self.deadline = min(deadline, latest)
        self.latest = latest
        self.seen = 0
        self.queued = False
        self.published = 0
        self.broken = False
        self.pending = PendingPage()


class Lookup:
    """A question to the shared store on its way."""

    def __init__(self, keys: Sequence[bytes], deadline: float) -> None:
        self.keys = keys
        self.deadline = deadline
        self.found: int | None = None
        self.pending = PendingPage()


class Recent:
    """Keys that were noted less than a given time ago; bounded."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def note(self, key: bytes, until: float) -> None:
        self._until[key] = until
        self._until.move_to_end(key)
        if len(self._until) > _REMEMBERED:
            self._until.popitem(last=False)

    def has(self, key: bytes, now: float) -> bool:
        return self._until.get(key, 0.0) > now
