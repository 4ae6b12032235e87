"""Sealed pages: nothing of them is in the files, nothing that was changed or moved is taken, and no secret, no page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pagetrie.kv import CacheManager, encode_namespace
from pagetrie.kv.tiers.disk import DiskTier
from pagetrie.kv.tiers.folder import CacheFolder
from pagetrie.kv.tiers.interface import PageRef, Tier, TierStats
from pagetrie.kv.tiers.opening import TierOptions, open_tiers
from pagetrie.kv.tiers.sealed import SEALED_BYTES, Keyring, SealedTier
from tests.kv.tiers.pages import KEYS, PAGE_BYTES, Clock, chain, content, read

ACME, OTHER = (encode_namespace({"tenant": bytes([number]) * 32}) for number in (1, 2))


def keyring(*namespaces: bytes) -> Keyring:
    made = Keyring()
    for namespace in namespaces:
        made.note(KEYS.root(namespace), namespace)
    return made


def open_tier(folder: Path, *namespaces: bytes) -> SealedTier:
    disk = DiskTier(CacheFolder(folder, sealed=True), 10**6, Clock())
    return SealedTier(disk, keyring(*namespaces))


def store(tier: Tier, refs: list[PageRef]) -> int:
    return tier.put([(ref, content(ref)) for ref in refs])


def test_pages_come_back_after_a_restart_and_are_nowhere_in_the_files(tmp_path: Path) -> None:
    refs = [*chain(5, name=ACME), *chain(3, name=OTHER)]
    tier = open_tier(tmp_path, ACME, OTHER)
    assert store(tier, refs) == 8 and tier.contains([ref.key for ref in refs]) == 8
    tier.close()
    files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for ref in refs:
        assert content(ref).tobytes()[:48] not in files, "page bytes in the clear"
        assert ref.tokens not in files, "token ids in the clear"
        assert len(files) > 8 * (PAGE_BYTES + SEALED_BYTES)
    tier = open_tier(tmp_path, ACME, OTHER)
    assert read(tier, refs[:5]) == refs[:5] and read(tier, refs[5:]) == refs[5:]
    tier.close()


def test_without_its_secret_a_tenants_pages_are_lost_and_others_are_not(tmp_path: Path) -> None:
    mine, theirs = chain(3, name=ACME), chain(3, name=OTHER)
    tier = open_tier(tmp_path, ACME, OTHER)
    store(tier, [*mine, *theirs])
    tier.close()
    # Who holds the disk, its secret and even the names of the pages, but not the tenant's secret:
    tier = open_tier(tmp_path, OTHER)
    assert read(tier, mine) == [] and read(tier, theirs) == theirs
    assert store(tier, mine[:1]) == 0
    tier.close()
    wrong = Keyring()
    wrong.note(mine[0].namespace, OTHER)
    tier = SealedTier(DiskTier(CacheFolder(tmp_path, sealed=True), 10**6, Clock()), wrong)
    assert read(tier, mine) == []
    assert tier.stats.failed_pages == 1


class Shelf:
    """A tier that hands out whatever it is told to."""

    name, traits = "shelf", DiskTier.traits

    def __init__(self) -> None:
        self.stats = TierStats()
        self.pages: dict[bytes, np.ndarray] = {}

    def put(self, pages):
        self.pages.update({ref.key: data.copy() for ref, data in pages})
        return len(pages)

    def get(self, refs):
        return (self.pages[ref.key] for ref in refs)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.mark.parametrize("place", [0, 11, 12, 500, -1])
def test_every_changed_byte_is_noticed(shelf: Shelf, place: int) -> None:
    tier, (ref,) = SealedTier(shelf, keyring(ACME)), chain(1, name=ACME)
    store(tier, [ref])
    assert read(tier, [ref]) == [ref]
    shelf.pages[ref.key][place] ^= 1
    assert read(tier, [ref]) == []


@pytest.mark.parametrize("length", [0, 5, SEALED_BYTES, SEALED_BYTES + 10])
def test_what_was_cut_short_is_noticed(shelf: Shelf, length: int) -> None:
    tier, (ref,) = SealedTier(shelf, keyring(ACME)), chain(1, name=ACME)
    store(tier, [ref])
    shelf.pages[ref.key] = shelf.pages[ref.key][:length]
    assert read(tier, [ref]) == []


def test_a_page_is_bound_to_its_name(shelf: Shelf) -> None:
    """Put in another one's place, under another parent or for other tokens, it is not taken."""
    tier, (first, second) = SealedTier(shelf, keyring(ACME)), chain(2, name=ACME)
    store(tier, [first, second])
    for changed in (
        replace(second, parent=first.parent),
        replace(second, tokens=first.tokens),
        replace(second, tokens=second.tokens[:4]),
    ):
        assert read(tier, [changed]) == []
    shelf.pages[second.key] = shelf.pages[first.key]
    assert read(tier, [second]) == []
    assert read(tier, [first]) == [first]


def test_no_two_seals_are_alike(shelf: Shelf) -> None:
    tier, (ref,) = SealedTier(shelf, keyring(ACME)), chain(1, name=ACME)
    seen = set()
    for _ in range(50):
        store(tier, [ref])
        seen.add(shelf.pages[ref.key].tobytes())
    assert len({sealed[:12] for sealed in seen}) == len(seen) == 50


class Memory:
    """A pool's bytes: each page says what was computed for it."""

    bytes_per_page = PAGE_BYTES

    def __init__(self, pages: int) -> None:
        self.pages = np.zeros((pages, PAGE_BYTES), np.uint8)

    def read_page(self, page: int) -> np.ndarray:
        return self.pages[page]

    def write_page(self, page: int, data: np.ndarray) -> None:
        self.pages[page] = data


def compute(manager: CacheManager, memory: Memory, tokens: list[int], namespace: bytes) -> int:
    """One request; returns what was cached."""
    while True:
        lease = manager.open(tokens, namespace)
        if lease.awaits is None:
            break
        lease.close()
        while not lease.awaits.done:
            manager.transfers.settle()
    cached = lease.cached_tokens
    lease.extend(len(tokens) - lease.computed)
    for number in range(lease.computed // manager.page_size, len(lease.pages)):
        memory.pages[lease.pages[number]] = np.arange(PAGE_BYTES) % 251 + number
    lease.commit(len(tokens) - lease.computed)
    lease.close()
    return cached


def test_through_the_cache_and_a_restart_under_the_same_and_another_secret(tmp_path: Path) -> None:
    tokens = list(range(100, 141))
    for namespace, sealed, cached in (
        (ACME, True, 0),
        (ACME, True, 40),
        (OTHER, True, 0),
        (ACME, True, 40),
        (ACME, False, 0),  # the same files without sealing are another cache
    ):
        memory = Memory(40)
        transfers, secret = open_tiers(TierOptions(disk=tmp_path, disk_bytes=10**6, sealed=sealed), memory)
        assert transfers is not None
        transfers.note_prefill(1, 0, 100.0)  # computing is slow, so that loading is worth it
        manager = CacheManager(num_pages=40, page_size=8, secret=secret, transfers=transfers)
        assert compute(manager, memory, tokens, namespace) == cached
        transfers.close()
