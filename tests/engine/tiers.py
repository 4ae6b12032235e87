"""A world with tiers: one that does as it is told, and threads that run when told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from pagetrie.kv.keys import ChainKeys
from pagetrie.kv.shares import Allowance
from pagetrie.kv.tiers.interface import Bytes, PageRef, Speed, Tier, TierStats, TierTraits
from pagetrie.kv.tiers.ram import ENTRY_BYTES, RamTier
from pagetrie.kv.tiers.stack import TierStack
from pagetrie.kv.tiers.workers import Pace
from pagetrie.kv.transfers import Transfers
from tests.engine.toy import ToyMemory, World, expected
from tests.kv.tiers.pages import Clock, ManualWorker

LONG = [2, *[7] * 192]  # 48 pages and a token
PROMPT = list(range(10, 51))  # 41 tokens: ten pages, and one token that is always computed
FAULTS = ("missing", "short", "exception", "wrong size", "too many", "stops")


class ToldTier:
    """A tier in a dictionary, with faults on order.

    Attributes:
        fault: what goes wrong in the next reads, "" for nothing. "missing": yes to the lookup, nothing in the read;
            "short": half of it; "wrong size": a page of other length; "too many": a page that nobody asked for;
            "stops": one page, and then it claims that all is well.
        on_read: called before each page is handed out.
        reads: keys asked for, one list per read.
    """

    def __init__(
        self, name: str = "disk", *, remote: bool = False, victim: bool = False, bandwidth: float = 1e9
    ) -> None:
        self.name = name
        self.traits = TierTraits(remote=remote, victim=victim, speed=Speed(1e-4, bandwidth))
        self.pages: dict[bytes, Bytes] = {}
        self.refs: dict[bytes, PageRef] = {}
        self.fault = ""
        self.on_read: Callable[[], None] = lambda: None
        self.reads: list[list[bytes]] = []
        self.asked = 0
        self.stats = TierStats()

    def holds(self, key: bytes) -> bool:
        return not self.traits.remote and key in self.pages

    def contains(self, keys: Sequence[bytes]) -> int:
        self.asked += 1
        return next((count for count, key in enumerate(keys) if key not in self.pages), len(keys))

    def get(self, refs: Sequence[PageRef]) -> Iterator[Bytes]:
        self.reads.append([ref.key for ref in refs])
        stop = {"missing": 0, "exception": 0, "short": len(refs) // 2, "stops": 1}.get(self.fault, len(refs))
        for ref in refs[:stop]:
            self.on_read()
            data = self.pages.get(ref.key)
            if data is None:
                return
            assert self.refs[ref.key] == ref
            yield data[:-4] if self.fault == "wrong size" else data
        if self.fault == "exception":
            raise OSError("planted")
        if self.fault == "too many":
            yield next(iter(self.pages.values()))

    def put(self, pages: Sequence[tuple[PageRef, Bytes]]) -> int:
        for ref, data in pages:
            self.pages[ref.key], self.refs[ref.key] = data.copy(), ref
        return len(pages)

    def touch(self, key: bytes) -> None:
        pass

    def name_namespace(self, key: bytes, namespace: bytes) -> None:
        pass

    def allow(self, allowances: Mapping[bytes, Allowance]) -> None:
        self.allowances = allowances

    def drop_owner(self, tag: bytes) -> None:
        for key in [key for key, ref in self.refs.items() if ref.namespace.startswith(tag)]:
            self.pages.pop(key, None)

    def clear(self) -> None:
        self.pages.clear()

    def close(self) -> None:
        pass


class TieredWorld(World):
    """A world with tiers, whose background work is done by ``work``.

    Attributes:
        computed: seconds that threads have computed, for the pace; their rests pass on ``clock``.
    """

    def __init__(self, *tiers: Tier, ram_pages: int = 0, page_size: int = 4, **options: object) -> None:
        self.clock = Clock()
        self.computed = 0.0
        self.workers: dict[str, ManualWorker] = {}
        self.ram: RamTier | None = None

        def make_worker(name: str) -> ManualWorker:
            self.workers[name] = ManualWorker()
            return self.workers[name]

        def make_transfers(memory: ToyMemory) -> Transfers:
            all_tiers = list(tiers)
            if ram_pages:
                size = memory.bytes_per_page
                self.ram = RamTier(ram_pages * (size + ENTRY_BYTES), size, self.clock)
                all_tiers.insert(0, self.ram)
            pace = Pace(lambda: self.computed, self._pass)
            stack = TierStack(all_tiers, memory, clock=self.clock, make_worker=make_worker, pace=pace)
            self.memory = memory
            return Transfers(stack, ChainKeys(bytes(32)))

        super().__init__(make_transfers=make_transfers, clock=self.clock, page_size=page_size, **options)  # type: ignore[arg-type]
        assert self.cache.transfers is not None
        self.transfers = self.cache.transfers

    def _pass(self, seconds: float) -> None:
        self.clock.now += seconds

    def work(self) -> None:
        """Let all background threads do what they have to do."""
        for worker in self.workers.values():
            worker.run()

    def finish(self, limit: int = 3000) -> None:
        """Step until nothing is left to do, the threads always keeping up."""
        for _ in range(limit):
            self.work()
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still busy after {limit} steps")

    def forget_pool(self) -> None:
        """Evict everything that nobody holds."""
        self.cache.index.evict(self.cache.index.cached_pages)
        self.check()
        self.work()


def stored(tier: ToldTier, **options: object) -> TieredWorld:
    """A world in which the prompt's pages are in the tier and not in the pool."""
    world = TieredWorld(tier, **options)
    world.add("first", PROMPT, max_tokens=3)
    world.finish()
    world.forget_pool()
    assert len(tier.pages) >= 10
    world.runner.computed_tokens = 0
    return world


def right(world: World, name: str, prompt: list[int] = PROMPT, max_tokens: int = 3) -> None:
    assert world.seen[name].tokens[0] == expected(prompt, max_tokens)
