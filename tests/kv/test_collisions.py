"""A5: a hash only proposes. With a bad one, contents are still right; equal tokens are what counts."""

from __future__ import annotations

import random

import pytest

from pagetrie.kv import CacheManager
from pagetrie.kv.hashchain import HashIndex
from pagetrie.kv.keys import ChainKeys
from pagetrie.kv.public import PublicPrefixes
from pagetrie.kv.tokens import TOKEN_BYTES
from tests.kv.oracle import GARBAGE

Memory = list[list[tuple[int, ...] | int]]


class Constant(ChainKeys):
    def page(self, parent: bytes, tokens: bytes) -> bytes:
        return b"same"


class OneByte(ChainKeys):
    """``token & 0xFF``, without the parent."""

    def page(self, parent: bytes, tokens: bytes) -> bytes:
        return tokens[::TOKEN_BYTES]


class Rolling(ChainKeys):
    """A polynomial in 31 over everything up to here."""

    def root(self, namespace: bytes) -> bytes:
        return bytes(8)

    def page(self, parent: bytes, tokens: bytes) -> bytes:
        value = int.from_bytes(parent, "little")
        for start in range(0, len(tokens), TOKEN_BYTES):
            value = value * 31 + int.from_bytes(tokens[start : start + TOKEN_BYTES], "little")
        return (value % 2**64).to_bytes(8, "little")


def manager_with(keys: type[ChainKeys], num_pages: int, page_size: int) -> CacheManager:
    manager = CacheManager(num_pages=num_pages, page_size=page_size, index="hash")
    manager.index = HashIndex(manager.pool, page_size, manager.pool.common.policy, keys(bytes(32)))
    manager._public = PublicPrefixes(manager.index)
    return manager


def serve(manager: CacheManager, memory: Memory, prompt: list[int], chunk: int) -> int:
    """Run a prompt as the engine would, check that its pages hold its tokens, and return how many were cached.

    A slot holds all tokens up to it, since that is what a key/value pair depends on.
    """
    lease = manager.open(prompt)
    while lease.computed < len(prompt):
        count = min(chunk, len(prompt) - lease.computed)
        assert lease.extend(count) == 0
        for source, destination in manager.take_copies():
            memory[destination] = memory[source].copy()
        for position in range(lease.computed, lease.computed + count):
            memory[lease.pages[position // manager.page_size]][position % manager.page_size] = tuple(
                prompt[: position + 1]
            )
        lease.commit(count)
        manager.check()
    size = manager.page_size
    assert [memory[lease.pages[p // size]][p % size] for p in range(len(prompt))] == [
        tuple(prompt[: p + 1]) for p in range(len(prompt))
    ]
    cached = lease.cached_tokens
    lease.close()
    manager.check()
    return cached


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("keys", [Constant, OneByte, Rolling])
def test_contents_are_right_under_a_bad_hash_and_refusals_are_counted(keys: type[ChainKeys]) -> None:
    rng = random.Random(5)
    manager = manager_with(keys, num_pages=24, page_size=2)
    memory: Memory = [[GARBAGE] * 2 for _ in range(24)]
    done: list[list[int]] = []
    hits = 0
    for _ in range(400):
        base = rng.choice(done[-20:]) if done and rng.random() < 0.7 else []
        prompt = base[: rng.randrange(len(base) + 1)] + rng.choices((65, 321, 96, 64, 8), k=rng.randrange(1, 6))
        prompt = prompt[:30]
        cached = serve(manager, memory, prompt, chunk=rng.choice((1, 2, 5, 30)))
        assert cached <= max((shared(prompt[:-1], other) for other in done), default=0)
        hits += cached
        done.append(prompt)
    index = manager.index
    assert isinstance(index, HashIndex)
    assert index.refused_hits > 10
    assert hits > 0


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("at", [0, 3, 4, 8, 11])
@pytest.mark.parametrize("pair", [((65, 65), (321, 65)), ((65, 65), (96, 64)), ((321, 65), (65, 65))])
def test_look_alike_tokens_share_nothing_from_the_change_on(
    index: str, at: int, pair: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    manager = CacheManager(num_pages=16, page_size=4, index=index)
    memory: Memory = [[GARBAGE] * 4 for _ in range(16)]
    before, after = (list(range(100, 100 + at)) + list(tokens) + [7] * 6 for tokens in pair)
    first_change = at + next(i for i in (0, 1) if pair[0][i] != pair[1][i])
    assert serve(manager, memory, before, chunk=5) == 0
    assert serve(manager, memory, after, chunk=5) == first_change
    assert serve(manager, memory, before, chunk=5) == len(before) - 1
    assert serve(manager, memory, after, chunk=5) == len(after) - 1


def test_the_constant_hash_stores_one_page_and_refuses_the_next() -> None:
    manager = manager_with(Constant, num_pages=8, page_size=2)
    index = manager.index
    assert isinstance(index, HashIndex)
    memory: Memory = [[GARBAGE] * 2 for _ in range(8)]
    assert serve(manager, memory, [1, 2, 3, 4, 5], chunk=5) == 0
    assert (index.refused_hits, manager.stats().cached_pages) == (1, 1)
    assert serve(manager, memory, [1, 2, 3, 4, 5], chunk=5) == 2
    assert serve(manager, memory, [9, 9, 9], chunk=3) == 0
