"""What the index says of a prompt that it doesn't hold, against the tree read by brute force."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from pagetrie.kv import CacheManager, Eviction, EvictionLog
from pagetrie.kv.page_tree import Node, walk
from pagetrie.kv.tokens import pack_tokens, unpack_tokens
from tests.budget import first
from tests.kv.driver import ALPHABET, NAMESPACES, RandomDriver
from tests.kv.oracle import Harness
from tests.kv.test_leases import store

SIZE = 4


def texts(manager: CacheManager, namespace: bytes) -> list[tuple[int, ...]]:
    """Every stored text of a namespace, from the root to a node's end."""
    root = manager.index.find_root(namespace)
    return [] if root is None else [unpack_tokens(b"".join(path)) for path in _paths(root)]


def _paths(root: Node) -> Iterator[list[bytes]]:
    for node in walk(root):
        path = []
        above: Node | None = node
        while above is not None and above.parent is not None:
            path.append(bytes(above.tokens))
            above = above.parent
        yield path[::-1]


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def pages(stored: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Each page as the text up to its end."""
    return {text[:end] for text in stored for end in (*range(SIZE, len(text) + 1, SIZE), len(text))}


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("seed", first(4, range(12)))
def test_a_diagnosis_agrees_with_the_tree_and_its_past(index: str, seed: int) -> None:
    manager = CacheManager(num_pages=14, page_size=SIZE, index=index, evictions=EvictionLog(lambda: 0.0))
    driver = RandomDriver(Harness(manager), seed)
    rng = random.Random(seed)
    past: dict[bytes, set[tuple[int, ...]]] = {namespace: set() for namespace in NAMESPACES}
    told = 0

    def remember_the_tree(then: Callable[[Node, int], None], node: Node, count: int) -> None:
        for namespace in NAMESPACES:
            past[namespace] |= pages(texts(manager, namespace))
        then(node, count)

    manager._evicting = partial(remember_the_tree, manager._evicting)  # type: ignore[method-assign]
    manager._forgetting = partial(remember_the_tree, manager._forgetting)  # type: ignore[method-assign]
    manager.index.on_evict = manager._evicting
    for _ in range(250):
        driver.operate()
        namespace = rng.choice(NAMESPACES)
        prompt = (*rng.choice(driver.seen), *rng.choices(ALPHABET, k=rng.randrange(3)))[: 6 * SIZE]
        stored = texts(manager, namespace)
        found = manager.diagnose(prompt, namespace, {"other": NAMESPACES[0]})
        assert found is not None
        assert found.matched == max((common(text, prompt) for text in stored), default=0)
        going_on = unpack_tokens(found.stored)
        if found.matched == len(prompt):
            assert going_on == ()
        if going_on:
            assert found.matched == len(prompt) or going_on[0] != prompt[found.matched]
            assert any(text[: found.matched + 1] == (*prompt[: found.matched], going_on[0]) for text in stored)
        if found.evicted:
            told += 1
            end = found.matched + found.evicted
            assert prompt[:end] in past[namespace] and prompt[:end] not in pages(stored)
        if found.elsewhere:
            assert max(common(text, prompt) for text in texts(manager, NAMESPACES[0])) >= found.elsewhere_tokens
            assert found.elsewhere_tokens > found.matched
    assert told, "no eviction was ever told of"


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_an_evicted_prefix_is_told_to_the_token(index: str) -> None:
    now = [5.0]
    manager = CacheManager(num_pages=4, page_size=SIZE, index=index, evictions=EvictionLog(lambda: now[0]))
    harness = Harness(manager)
    store(harness, list(range(10)))  # two pages and a half
    taker = harness.open(list(range(100, 112)))
    taker.lease.holder = "someone"
    now[0] = 8.0
    assert harness.extend(taker, 12)
    found = manager.diagnose([*range(10), 77], b"a")
    assert found is not None and found.matched + found.evicted == 10
    assert found.eviction == Eviction(8.0, "room", "someone", b"a")


def test_the_log_is_bounded_and_keeps_the_latest() -> None:
    log = EvictionLog(lambda: 0.0, capacity=3)
    for time, names in enumerate(([b"a", b"b"], [b"c", b"a"], [b"d"])):
        log.note(names, Eviction(float(time), "room"))
    assert len(log) == 3 and log.get(b"b") is None
    assert [log.get(name).time for name in (b"c", b"a", b"d")] == [1.0, 1.0, 2.0]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="capacity of at least 1, got 0"):
        EvictionLog(lambda: 0.0, 0)


def test_packing_and_back() -> None:
    ids = (0, 1, 255, 256, 65_536, 2**32 - 1)
    assert unpack_tokens(pack_tokens(ids)) == ids and unpack_tokens(b"") == ()
