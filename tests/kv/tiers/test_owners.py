"""Floors and caps of owners in the tiers that are ours: against plain models, through restarts, and swept away."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagetrie.kv import Allowance, encode_namespace, owner_id
from pagetrie.kv.keys import TAG_BYTES, tag_of
from pagetrie.kv.tiers.disk import FLOORS, DiskTier
from pagetrie.kv.tiers.folder import CacheFolder
from pagetrie.kv.tiers.interface import Bytes, PageRef, Tier
from pagetrie.kv.tiers.opening import sweep
from pagetrie.kv.tiers.owners import Owners
from pagetrie.kv.tiers.ram import ENTRY_BYTES, RamTier
from pagetrie.kv.tiers.sealed import Keyring, SealedTier
from pagetrie.kv.tiers.workers import WriteQueue
from tests.kv.tiers.pages import KEYS, PAGE_BYTES, SECRET, Clock, ManualWorker, chain, content, read

SPACES = {name: encode_namespace({"tenant": name.encode(), "salt": None}) for name in "abc"}
OWNERS = {name: owner_id("tenant", name.encode()) for name in "abc"}
TAGS = {name: KEYS.tag(owner) for name, owner in OWNERS.items()}


def pages(name: str, count: int, first: int = 0) -> list[PageRef]:
    return chain(count, name=SPACES[name], first=first)


def put(tier: Tier, refs: list[PageRef]) -> int:
    return sum(tier.put([(ref, content(ref))]) for ref in refs)


def held(tier: Tier, refs: list[PageRef]) -> int:
    return sum(tier.holds(ref.key) for ref in refs)


def ram(slots: int) -> RamTier:
    return RamTier(slots * (PAGE_BYTES + ENTRY_BYTES), PAGE_BYTES)


def disk(folder: Path, capacity: int) -> DiskTier:
    return DiskTier(CacheFolder(folder, SECRET), capacity, Clock())


def test_a_namespaces_name_begins_with_its_owners_tag_and_tells_epochs_apart() -> None:
    salted = encode_namespace({"tenant": b"a", "salt": "s"})
    assert tag_of(KEYS.root(SPACES["a"])) == tag_of(KEYS.root(salted)) == TAGS["a"] != TAGS["b"]
    assert len(TAGS["a"]) == TAG_BYTES and len(KEYS.root(salted)) == 32
    names = {KEYS.root(space, epoch) for space in (*SPACES.values(), salted) for epoch in (b"", b"1")}
    assert len(names) == 8 and len({name[TAG_BYTES:] for name in names}) == 8


@pytest.mark.parametrize("seed", range(4))
def test_who_gives_is_who_is_furthest_above_its_floor(seed: int) -> None:
    rng = random.Random(seed)
    owners, used = Owners(1000), dict.fromkeys(TAGS.values(), 0)
    allowed = {tag: Allowance(rng.choice((0, 0.1, 0.3)), 1, rng.choice((1, 2, 3))) for tag in used}
    owners.allow(allowed)
    for _ in range(600):
        tag = rng.choice(list(used))
        size = rng.randrange(1, 50)
        if rng.random() < 0.6:
            owners.add(tag, size)
            used[tag] += size
        elif used[tag]:
            size = min(size, used[tag])
            owners.remove(tag, size)
            used[tag] -= size
        excess = {
            tag: (count - allowed[tag].floor * 1000) / allowed[tag].weight for tag, count in used.items() if count
        }
        most = max(excess.values(), default=0)
        for taker in used:
            giver = owners.giver(taker)
            if most > 0:
                assert giver is not None and excess[giver] == most
            else:
                assert giver == (taker if used[taker] else None)
    assert owners.used == {tag: count for tag, count in used.items() if count}


def test_ram_keeps_floors_and_caps_and_each_owner_its_latest() -> None:
    tier = ram(12)
    tier.allow({TAGS["a"]: Allowance(floor=0.25), TAGS["b"]: Allowance(floor=0.25, cap=0.5)})
    mine, flood = pages("a", 3), pages("c", 40)
    put(tier, mine)
    put(tier, flood)
    assert held(tier, mine) == 3 and held(tier, flood) == 9 and held(tier, flood[-9:]) == 9
    capped = pages("b", 20)
    put(tier, capped)
    assert held(tier, capped) == held(tier, capped[-6:]) == 6
    assert held(tier, mine) == 3 and held(tier, flood) == 3
    assert read(tier, mine) == mine and tier.stats.pages == 12
    tier.allow({TAGS["b"]: Allowance(cap=0.25)})
    assert held(tier, capped) == held(tier, capped[-3:]) == 3
    tier.allow({TAGS["b"]: Allowance(cap=0)})
    assert held(tier, capped) == 0 and put(tier, capped[:1]) == 0


@pytest.mark.parametrize("seed", range(3))
def test_ram_against_a_model(seed: int) -> None:
    rng, slots = random.Random(seed), 10
    allowed = {"a": Allowance(0.3, 1), "b": Allowance(0.2, 0.4, 2), "c": Allowance(0, 1)}
    tier = ram(slots)
    tier.allow({TAGS[name]: allowance for name, allowance in allowed.items()})
    known = {name: pages(name, 15) for name in "abc"}
    lines: dict[str, list[PageRef]] = {name: [] for name in "abc"}
    for _ in range(800):
        name = rng.choice("abc")
        ref = rng.choice(known[name])
        line = lines[name]
        if ref in line:
            line.remove(ref)
            line.append(ref)
        else:
            excess = {
                other: (len(refs) - allowed[other].floor * slots) / allowed[other].weight
                for other, refs in lines.items()
                if refs
            }
            giver = ""
            if allowed[name].cap < 1 and len(line) + 1 > allowed[name].cap * slots:
                giver = name
            elif sum(map(len, lines.values())) == slots:
                giver = max(excess, key=lambda other: excess[other])
                giver = giver if excess[giver] > 0 else name
            ties = [other for other in excess if giver and giver != name and excess[other] == excess[giver]]
            before = {other: list(refs) for other, refs in lines.items()}
            assert put(tier, [ref]) == 1
            for other in ties if len(ties) > 1 else [giver] if giver else []:
                if not tier.holds(before[other][0].key):
                    del lines[other][0]
            line.append(ref)
            continue
        assert put(tier, [ref]) == 1
        for other, refs in lines.items():
            assert [r for r in known[other] if tier.holds(r.key)] == [r for r in known[other] if r in refs]


def test_ram_lets_go_of_an_owner_even_while_it_is_read() -> None:
    tier = ram(4)
    one, two, three = pages("a", 3)
    other = pages("b", 2)
    put(tier, [one, two, *other])
    reading = tier.get([one])
    data = next(reading)
    tier.drop_owner(TAGS["a"])
    assert not tier.holds(one.key) and not tier.holds(two.key) and held(tier, other) == 2
    assert put(tier, [three]) == 1 and (data == content(one)).all()
    reading.close()  # type: ignore[attr-defined]
    assert read(tier, other) == other


def test_disk_keeps_floors_through_floods_and_restarts(tmp_path: Path) -> None:
    capacity = 200_000
    floors = {TAGS["a"]: Allowance(floor=0.3)}
    tier = disk(tmp_path, capacity)
    tier.allow(floors)
    room = int(0.3 * FLOORS * tier._limit / (PAGE_BYTES + 250))
    mine = pages("a", room)
    put(tier, mine)
    for restart in range(3):
        put(tier, pages("b", 300, first=10_000 * restart))
        assert held(tier, mine) == room
        assert tier.stats.used_bytes <= capacity
        tier.close()
        tier = disk(tmp_path, capacity)
        assert held(tier, mine) == room
        tier.allow(floors)
    assert read(tier, mine) == mine
    # What is beyond the floor goes like everybody's.
    more = pages("a", 100, first=500_000)
    put(tier, more)
    put(tier, pages("b", 300, first=900_000))
    assert held(tier, mine) + held(tier, more) <= room + 40
    tier.close()


def test_disk_keeps_caps_and_what_was_used_of_late(tmp_path: Path) -> None:
    tier = disk(tmp_path, 400_000)
    tier.allow({TAGS["a"]: Allowance(cap=0.1)})
    hot, cold = pages("a", 5), pages("a", 200, first=10_000)
    put(tier, hot)
    for number, ref in enumerate(cold):
        put(tier, [ref])
        if number % 10 == 0:
            tier.touch(hot[-1].key)
    live = held(tier, hot) + held(tier, cold)
    assert live * (PAGE_BYTES + 100) <= 0.1 * 400_000
    assert held(tier, hot) == 5 and held(tier, cold[-5:]) == 5
    tier.close()
    tier = disk(tmp_path, 400_000)
    tier.allow({TAGS["a"]: Allowance(cap=0.1)})
    assert (held(tier, hot) + held(tier, cold)) * (PAGE_BYTES + 100) <= 0.1 * 400_000
    tier.close()


def bytes_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


def test_disk_deletes_an_owner_from_its_files_and_nothing_else(tmp_path: Path) -> None:
    tier = disk(tmp_path, 10**6)
    tier.allow({TAGS["a"]: Allowance(cap=0.02)})  # some of it is given up already, and still in the files
    mine, theirs = pages("a", 60), pages("b", 60)
    for name in "ab":
        tier.name_namespace(KEYS.root(SPACES[name]), SPACES[name])
    for pair in zip(mine, theirs, strict=True):
        put(tier, list(pair))
    before = bytes_of(tmp_path)
    assert all(content(ref).tobytes() in before and ref.tokens in before for ref in mine)
    assert SPACES["a"] in before
    tier.drop_owner(TAGS["a"])
    after = bytes_of(tmp_path)
    assert not any(content(ref).tobytes() in after or ref.key in after for ref in mine)
    assert SPACES["a"] not in after and SPACES["b"] in after
    assert held(tier, mine) == 0 and read(tier, theirs) == theirs
    assert put(tier, pages("c", 3)) == 3
    tier.close()
    tier = disk(tmp_path, 10**6)
    assert held(tier, mine) == 0 and read(tier, theirs) == theirs
    tier.close()


def test_a_cache_without_a_server_is_swept_by_the_command(tmp_path: Path) -> None:
    tier = disk(tmp_path, 10**6)
    mine, theirs = pages("a", 20), pages("b", 20)
    put(tier, mine + theirs)
    tier.close()
    assert sweep(tmp_path, [OWNERS["a"], OWNERS["c"]], SECRET) == 20
    assert not any(content(ref).tobytes() in bytes_of(tmp_path) for ref in mine)
    tier = disk(tmp_path, 10**6)
    assert read(tier, theirs) == theirs
    tier.close()


def test_sealed_pages_of_an_owner_can_be_deleted_without_its_key(tmp_path: Path) -> None:
    keyring = Keyring()
    for space in SPACES.values():
        keyring.note(KEYS.root(space), space)
    folder = CacheFolder(tmp_path, SECRET, sealed=True)
    tier = SealedTier(DiskTier(folder, 10**6, Clock()), keyring)
    mine, theirs = pages("a", 10), pages("b", 10)
    put(tier, mine + theirs)
    keyring.forget(TAGS["a"])
    assert keyring.get(KEYS.root(SPACES["a"])) is None and keyring.get(KEYS.root(SPACES["b"])) is not None
    assert put(tier, pages("a", 1, first=777)) == 0 and read(tier, mine) == []
    tier.close()
    assert sweep(tmp_path, [OWNERS["a"]], SECRET) == 10
    assert not any(ref.key in bytes_of(tmp_path) for ref in mine)


def test_a_flood_of_writes_takes_turns_and_gives_way() -> None:
    written: list[PageRef] = []

    class Shelf(RamTier):
        def put(self, pages: Sequence[tuple[PageRef, Bytes]]) -> int:
            written.extend(ref for ref, _ in pages)
            return super().put(pages)

    worker = ManualWorker()
    queue = WriteQueue(Shelf(100 * (PAGE_BYTES + ENTRY_BYTES), PAGE_BYTES), worker, 40 * PAGE_BYTES)
    flood, mine = pages("a", 60), pages("b", 8)
    assert [queue.offer(ref, content(ref)) for ref in flood] == [True] * 40 + [False] * 20
    assert all(queue.offer(ref, content(ref)) for ref in mine)
    assert queue.dropped_pages == 28 and queue.waiting_bytes == 40 * PAGE_BYTES
    worker.run()
    # Every second batch is the other one's, and the flood's first pages stay.
    assert written == [*flood[:16], *mine, *flood[16:32]]
    assert queue.waiting_bytes == 0 and all(queue.lacks(ref.key) for ref in flood[32:])


def test_what_waits_to_be_written_goes_too() -> None:
    tier, worker = ram(10), ManualWorker()
    queue = WriteQueue(tier, worker, 10 * PAGE_BYTES)
    mine, theirs = pages("a", 3), pages("b", 2)
    for ref in (*mine, *theirs):
        queue.offer(ref, content(ref))
    queue.forget(TAGS["a"])
    assert queue.waiting_bytes == 2 * PAGE_BYTES and all(queue.lacks(ref.key) for ref in mine)
    worker.run()
    assert held(tier, mine) == 0 and held(tier, theirs) == 2
