"""Every policy against a plain model of it, which keeps lists and goes through all of them, over random histories."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import ClassVar

import pytest

from pagetrie.kv import CacheManager
from pagetrie.kv.eviction import EvictionPolicy, Use, make_policy
from pagetrie.kv.eviction.adaptive import Adaptive
from pagetrie.kv.page_tree import Node


class Model:
    """What a policy is told, written down; subclasses say which leaf should go."""

    def __init__(self, num_pages: int, now: Callable[[], float]) -> None:
        self.num_pages = num_pages
        self.now = now
        self.leaves: list[Node] = []
        self.steps = itertools.count(1)
        self.stored: dict[Node, int] = {}
        self.used: dict[Node, int] = {}
        self.uses: dict[Node, int] = {}

    def created(self, node: Node) -> None:
        self.stored[node] = self.used[node] = next(self.steps)
        self.uses[node] = 0

    def touch(self, node: Node, use: Use | None) -> None:
        step = next(self.steps)
        while node.parent is not None:
            self.used[node] = step
            self.uses[node] += use is not None
            self.on_use(node, use)
            node = node.parent

    def on_use(self, node: Node, use: Use | None) -> None: ...

    def split(self, upper: Node, lower: Node) -> None:
        for known in (self.stored, self.used, self.uses):
            known[upper] = known[lower]

    def add(self, node: Node) -> None:
        self.leaves.append(node)

    def remove(self, node: Node) -> None:
        if node in self.leaves:
            self.leaves.remove(node)

    def evicted(self, node: Node, pages: int) -> None:
        if pages == len(node.pages):
            self.leaves.remove(node)

    def victim(self) -> Node | None:
        raise NotImplementedError


class LruModel(Model):
    def victim(self) -> Node | None:
        return min(self.leaves, key=lambda node: self.used[node], default=None)


class FifoModel(Model):
    def victim(self) -> Node | None:
        return min(self.leaves, key=lambda node: self.stored[node], default=None)


class LfuModel(Model):
    """``base`` is the age of the cache when a leaf was queued."""

    def __init__(self, num_pages: int, now: Callable[[], float]) -> None:
        super().__init__(num_pages, now)
        self.age = 0.0
        self.rank: dict[Node, float] = {}

    def worth(self, node: Node) -> float:
        return self.uses[node]

    def add(self, node: Node) -> None:
        super().add(node)
        self.rank[node] = self.age + self.worth(node)

    def evicted(self, node: Node, pages: int) -> None:
        self.age = self.rank[node]
        super().evicted(node, pages)

    def victim(self) -> Node | None:
        return min(self.leaves, key=lambda node: (self.rank[node], self.used[node]), default=None)


class GdsfModel(LfuModel):
    def worth(self, node: Node) -> float:
        before, above = 0, node.parent
        while above is not None:
            before += len(above.pages)
            above = above.parent
        return self.uses[node] * (1 + (before + len(node.pages) / 2) * PAGE / 20_000)


class TtlModel(Model):
    def __init__(self, num_pages: int, now: Callable[[], float]) -> None:
        super().__init__(num_pages, now)
        self.until: dict[Node, float] = {}

    def on_use(self, node: Node, use: Use | None) -> None:
        if use is not None and use.ttl is not None:
            self.until[node] = max(self.until.get(node, 0), self.now() + use.ttl)

    def split(self, upper: Node, lower: Node) -> None:
        super().split(upper, lower)
        if lower in self.until:
            self.until[upper] = self.until[lower]

    def victim(self) -> Node | None:
        def place(node: Node) -> tuple[int, float]:
            if node not in self.until:
                return 1, self.used[node]
            return (2 if self.until[node] > self.now() else 0), self.until[node]

        return min(self.leaves, key=place, default=None)


class TwoListsModel(Model):
    """``sizes`` are the pages of queued leaves, as they were when they were queued, less what was evicted since."""

    def __init__(self, num_pages: int, now: Callable[[], float]) -> None:
        super().__init__(num_pages, now)
        self.main: set[Node] = set()
        self.sizes: dict[Node, int] = {}

    def add(self, node: Node) -> None:
        super().add(node)
        self.sizes[node] = len(node.pages)

    def evicted(self, node: Node, pages: int) -> None:
        super().evicted(node, pages)
        self.sizes[node] -= pages

    def queue(self, *, main: bool) -> list[Node]:
        return [node for node in self.leaves if (node in self.main) == main]

    def pages(self, *, main: bool) -> int:
        return sum(self.sizes[node] for node in self.queue(main=main))

    def split(self, upper: Node, lower: Node) -> None:
        super().split(upper, lower)
        if lower in self.main:
            self.main.add(upper)


class SlruModel(TwoListsModel):
    def add(self, node: Node) -> None:
        super().add(node)
        self.main.discard(node)
        if self.uses[node] >= 2:
            self.main.add(node)
        while self.pages(main=True) > 0.8 * (self.pages(main=True) + self.pages(main=False)):
            fallen = min(self.queue(main=True), key=lambda node: self.used[node])
            self.main.discard(fallen)
            self.uses[fallen], self.used[fallen] = 1, next(self.steps)
            self.sizes[fallen] = len(fallen.pages)

    def victim(self) -> Node | None:
        return min(self.leaves, key=lambda node: (node in self.main, self.used[node]), default=None)


class S3FifoModel(TwoListsModel):
    def __init__(self, num_pages: int, now: Callable[[], float]) -> None:
        super().__init__(num_pages, now)
        self.place: dict[Node, int] = {}
        self.ghosts: list[tuple[Node | None, bytes, int]] = []

    def created(self, node: Node) -> None:
        super().created(node)
        self.place[node], self.uses[node] = self.stored[node], -1
        known = [ghost for ghost in self.ghosts if ghost[:2] == (node.parent, node.key)]
        if known:
            self.main.add(node)
            self.ghosts.remove(known[0])

    def on_use(self, node: Node, use: Use | None) -> None:
        self.uses[node] = min(self.uses[node], 3)

    def split(self, upper: Node, lower: Node) -> None:
        super().split(upper, lower)
        self.place[upper] = self.place[lower]

    def victim(self) -> Node | None:
        while self.leaves:
            small = sorted(self.queue(main=False), key=lambda node: self.place[node])
            main = sorted(self.queue(main=True), key=lambda node: self.place[node])
            from_small = small and (
                self.pages(main=False) > 0.1 * (self.pages(main=False) + self.pages(main=True)) or not main
            )
            node = small[0] if from_small else main[0]
            if self.uses[node] <= (1 if from_small else 0):
                return node
            self.uses[node] = 0 if from_small else self.uses[node] - 1
            self.main.add(node)
            self.place[node] = next(self.steps)
            self.sizes[node] = len(node.pages)
        return None

    def evicted(self, node: Node, pages: int) -> None:
        if node not in self.main and pages == len(node.pages):
            self.ghosts = [ghost for ghost in self.ghosts if ghost[:2] != (node.parent, node.key)]
            self.ghosts.append((node.parent, node.key, pages))
            while sum(ghost[2] for ghost in self.ghosts) > 0.9 * self.num_pages:
                del self.ghosts[0]
        super().evicted(node, pages)


MODELS: dict[str, type[Model]] = {
    "lru": LruModel,
    "fifo": FifoModel,
    "lfu": LfuModel,
    "gdsf": GdsfModel,
    "ttl": TtlModel,
    "slru": SlruModel,
    "s3-fifo": S3FifoModel,
}
PAGE = 4


class Checked(EvictionPolicy):
    """A policy and its model, told the same and asked the same."""

    name: ClassVar[str] = "checked"

    def __init__(self, policy: EvictionPolicy, model: Model) -> None:
        self.policy, self.model = policy, model
        self.asked = 0
        self.ttl = random.Random(3)

    def created(self, node: Node) -> None:
        self.policy.created(node)
        self.model.created(node)

    def touch(self, node: Node, use: Use | None) -> None:
        if use is not None and self.ttl.random() < 0.3:
            use.ttl = self.ttl.uniform(0, 60)
        self.model.touch(node, use)
        self.policy.touch(node, use)

    def split(self, upper: Node, lower: Node) -> None:
        self.policy.split(upper, lower)
        self.model.split(upper, lower)

    def add(self, node: Node) -> None:
        self.policy.add(node)
        self.model.add(node)

    def remove(self, node: Node) -> None:
        self.policy.remove(node)
        self.model.remove(node)

    def evicted(self, node: Node, pages: int) -> None:
        self.policy.evicted(node, pages)
        self.model.evicted(node, pages)

    def victim(self) -> Node | None:
        victim = self.policy.victim()
        assert victim is self.model.victim()
        self.asked += victim is not None
        return victim

    def queued(self) -> set[Node]:
        assert self.policy.queued() == set(self.model.leaves)
        return self.policy.queued()


class Traffic:
    """Conversations, some of which go on and some of which branch off, on a manager with a short pool."""

    def __init__(self, index: str, num_pages: int, seed: int) -> None:
        self.time = 0.0
        self.rng = random.Random(seed)
        self.index, self.num_pages = index, num_pages
        self.known: list[list[int]] = [[1, 2, 3, 4, 5, 6]]

    def clock(self) -> float:
        return self.time

    def run(self, policy: EvictionPolicy, requests: int) -> CacheManager:
        rng = self.rng
        manager = CacheManager(num_pages=self.num_pages, page_size=PAGE, index=self.index, policy=policy)
        held = []
        for number in range(requests):
            self.time += rng.expovariate(0.5)
            base = rng.choice(self.known)
            prompt = base[: rng.randrange(len(base) + 1)] if rng.random() < 0.5 else list(base)
            prompt = [*prompt, *(rng.randrange(3) for _ in range(rng.randrange(1, 12)))][: 8 * PAGE]
            lease = manager.open(prompt)
            count = len(prompt) - lease.computed
            if number % 7 and not lease.extend(count):
                lease.commit(len(prompt) - lease.computed)
            self.known = [*self.known[-15:], prompt]
            manager.take_copies()
            held.append(lease)
            if len(held) > 3:
                held.pop(rng.randrange(len(held))).close()
            if number % 50 == 0:
                manager.check()
            if number == requests // 2:
                manager.reset()
        for lease in held:
            lease.close()
        manager.check()
        return manager


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("name", MODELS)
def test_the_leaf_that_goes_is_the_one_that_the_model_names(name: str, index: str) -> None:
    traffic = Traffic(index, 40, seed=1)
    checked = Checked(make_policy(name, 40, PAGE, traffic.clock), MODELS[name](40, traffic.clock))
    traffic.run(checked, 1500)
    assert checked.asked > 500


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_the_adaptive_policy_takes_the_leaf_of_least_worth(index: str) -> None:
    """Right after a weighing; between two of them it goes by what it weighed last."""

    class Weighing(Adaptive):
        asked = 0

        def victim(self) -> Node | None:
            self._weighed = -math.inf
            victim = super().victim()
            if victim is not None:
                now = self._clock()
                assert self.worth(victim, now) == min(self.worth(node, now) for node in self.queued())
                Weighing.asked += 1
            return victim

    traffic = Traffic(index, 40, seed=2)
    traffic.run(Weighing(40, PAGE, traffic.clock), 1500)
    assert Weighing.asked > 500


def test_a_lease_that_was_given_up_to_wait_is_no_use() -> None:
    checked = Checked(make_policy("lfu", 8, PAGE), LfuModel(8, lambda: 0.0))
    manager = CacheManager(num_pages=8, page_size=PAGE, policy=checked)
    lease = manager.open([1] * PAGE)
    lease.extend(PAGE)
    lease.commit(PAGE)
    lease.close()
    (node,) = manager.index.nodes()
    assert checked.model.uses[node] == 1
    manager.open([1] * (PAGE + 1)).close()
    assert checked.model.uses[node] == 1 and node.mark[0] == 1
