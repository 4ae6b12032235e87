"""The disk tier against a dictionary, through restarts, crashes, damage and full disks."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagetrie.errors import ConfigError
from pagetrie.kv.tiers.disk import RETRY_SECONDS, DiskTier
from pagetrie.kv.tiers.folder import CacheFolder, FolderInUseError
from pagetrie.kv.tiers.interface import PageRef
from pagetrie.kv.tiers.opening import TierOptions, open_tiers
from pagetrie.kv.tiers.segment import Segment
from tests.engine.toy import ToyMemory
from tests.kv.tiers.pages import Clock, chain, content, read

BIG = 10**6


def open_tier(folder: Path, capacity: int = BIG, clock: Clock | None = None) -> DiskTier:
    return DiskTier(CacheFolder(folder), capacity, clock or Clock())


def store(tier: DiskTier, refs: list[PageRef]) -> int:
    return sum(tier.put([(ref, content(ref))]) for ref in refs)


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*"))


POOL = chain(40) + chain(40, name=b"b")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 79)),
        st.tuples(st.just("get"), st.integers(0, 79)),
        st.tuples(st.just("touch"), st.integers(0, 79)),
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.just("kill"), st.integers(0, 10**6)),
        st.tuples(st.just("flip"), st.integers(0, 10**9)),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps, capacity=st.sampled_from([6_000, 20_000, BIG]))
def test_a_random_history(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], capacity: int
) -> None:
    """D2, D3: it never hands out wrong bytes, never exceeds its cap, always starts; undamaged, it has what it says."""
    folder = tmp_path_factory.mktemp("disk")
    tier = open_tier(folder, capacity)
    damaged = False
    for name, number in steps:
        if name == "put":
            assert store(tier, [POOL[number]]) == 1
            assert tier.holds(POOL[number].key)
        elif name == "get":
            held = tier.holds(POOL[number].key)
            got = read(tier, [POOL[number]])
            assert got in ([], [POOL[number]])
            assert held == bool(got) or damaged
            assert tier.holds(POOL[number].key) == bool(got)
        elif name == "touch":
            tier.touch(POOL[number].key)
        elif name == "restart":
            before = {ref.key for ref in POOL if tier.holds(ref.key)}
            tier.close()
            tier = open_tier(folder, capacity)
            assert damaged or {ref.key for ref in POOL if tier.holds(ref.key)} == before
        elif name == "kill":  # in the middle of a write: the newest segment ends anywhere
            tier.folder.close()
            if files := segments(folder):
                os.truncate(files[-1], number % (files[-1].stat().st_size + 1))
                damaged = True
            tier = open_tier(folder, capacity)
        elif name == "flip" and (files := segments(folder)):
            path = files[number % len(files)]
            raw = bytearray(path.read_bytes())
            place = number % (8 * len(raw))
            raw[place // 8] ^= 1 << place % 8
            with path.open("r+b") as file:  # the same file: open descriptors see it
                file.write(raw)
            damaged = True
        assert bytes_in(folder) <= capacity
    tier.close()
    shutil.rmtree(folder)


def test_every_point_of_a_crash(tmp_path: Path) -> None:
    """D2, SIGKILL in the middle of a write: whole pages stay, the torn one is gone, the next one is appended."""
    refs = chain(4)
    tier = open_tier(tmp_path / "a")
    store(tier, refs[:3])
    tier.folder.close()  # as a kill leaves it: no index
    (path,) = segments(tmp_path / "a")
    raw = path.read_bytes()
    record = (len(raw) - 32) // 3
    for size in range(0, len(raw) + 1, 7):
        folder = tmp_path / f"at-{size}"
        folder.mkdir()
        shutil.copy(tmp_path / "a" / "secret", folder)
        (folder / path.name).write_bytes(raw[:size])
        tier = open_tier(folder)
        whole = max(0, (size - 32) // record)
        assert read(tier, refs) == refs[:whole]
        assert store(tier, refs[3:]) == 1
        tier.close()
        again = open_tier(folder)
        assert read(again, refs[:whole]) == refs[:whole] and read(again, refs[3:]) == refs[3:]
        again.close()


_WRITER = """
import sys
from pathlib import Path
from tests.kv.tiers.pages import chain, content
from tests.kv.tiers.test_disk import open_tier
tier = open_tier(Path(sys.argv[1]), 200_000)
for ref in chain(400):
    tier.put([(ref, content(ref))])
    print(flush=True)
"""


@pytest.mark.slow
def test_killed_fifty_times(tmp_path: Path) -> None:
    """D2: a process that is killed while it writes: the next start works, and what it finds is right."""
    refs, rng = chain(400), random.Random(0)
    for _ in range(50):
        process = subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(rng.randrange(1, 60)):
            process.stdout.readline()
        process.kill()
        process.wait()
        process.stdout.close()
        tier = open_tier(tmp_path, 200_000)
        for ref in refs:
            assert bool(read(tier, [ref])) == tier.holds(ref.key)
        tier.close()
        assert bytes_in(tmp_path) <= 200_000


def test_the_cap_holds_and_used_prefixes_stay(tmp_path: Path) -> None:
    """C9 and D3: one chat that is used again and again outlives a stream of prompts that nobody asks for twice."""
    tier = open_tier(tmp_path, 60_000)
    chat = chain(8, name=b"chat")
    store(tier, chat)
    for number in range(40):
        store(tier, chain(4, name=b"once-%d" % number))
        tier.touch(chat[-1].key)
        assert bytes_in(tmp_path) <= 60_000
    assert read(tier, chat) == chat
    assert tier.stats.evicted_pages > 100
    tier.close()
    smaller = open_tier(tmp_path, 20_000)
    assert bytes_in(tmp_path) <= 20_000
    smaller.close()


def test_a_cap_through_traffic_and_a_restart(tmp_path: Path) -> None:
    """D3: 30 MB of the bundled model's pages through 10 MB, a restart after half of it, another under a smaller cap."""
    page = 368_640
    for half, capacity in enumerate((10 * 10**6, 10 * 10**6, 6 * 10**6)):
        tier = open_tier(tmp_path, capacity)
        assert bytes_in(tmp_path) <= capacity
        for ref in chain(41, name=b"half %d" % half):
            assert tier.put([(ref, content(ref, page))]) == 1
            assert bytes_in(tmp_path) <= capacity
        assert tier.stats.pages >= capacity // page // 2, "the cap leaves most of itself unused"
        tier.close()
        assert bytes_in(tmp_path) <= capacity


def test_what_is_counted_after_a_restart_is_what_can_be_read(tmp_path: Path) -> None:
    """D6: no page is reported that isn't there, none is there that isn't reported."""
    tier = open_tier(tmp_path, 60_000)
    refs = chain(80)
    store(tier, refs)
    tier.close()
    with segments(tmp_path)[-2].open("r+b") as file:
        file.truncate(2_000)
    tier = open_tier(tmp_path, 60_000)
    pages = tier.stats.pages
    assert 0 < pages == sum(bool(read(tier, [ref])) for ref in refs) < 60_000 // 1_300
    tier.close()


def test_segments_that_vanish(tmp_path: Path) -> None:
    """D3: a file that somebody deleted is still read while it is open, and its eviction is no error."""
    tier = open_tier(tmp_path, 20_000)
    refs = chain(3)
    store(tier, refs)
    for path in segments(tmp_path):
        path.unlink()
    assert read(tier, refs) == refs
    more = chain(60, name=b"more")
    assert store(tier, more) == 60
    assert not tier.holds(refs[0].key) and tier.stats.healthy and tier.stats.refused_pages == 0
    assert read(tier, more[-3:]) == more[-3:]
    tier.close()


def test_a_page_larger_than_the_cap_is_refused(tmp_path: Path) -> None:
    """D11: refused, counted, and nothing is thrown out for it."""
    tier = open_tier(tmp_path, 5_000)
    (small,) = chain(1)
    store(tier, [small])
    (large,) = chain(1, name=b"large")
    assert tier.put([(large, content(large, 6_000))]) == 0
    assert tier.stats.refused_pages == 1
    assert read(tier, [small]) == [small]
    tier.close()


def test_a_cap_below_two_pages_is_refused_at_the_start(tmp_path: Path) -> None:
    """D11: with both numbers, before anything is made."""
    memory = ToyMemory(1, 4)
    memory.bytes_per_page = 12_000_000
    options = TierOptions(disk=tmp_path / "pages", disk_bytes=10_000_000)
    with pytest.raises(ConfigError, match="disk cache of 10000000 bytes is too small: a page takes 12000000 bytes"):
        open_tiers(options, memory)
    assert not (tmp_path / "pages").exists()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """D3: nothing is stored for a while, one line says so, reading goes on, a torn record is cut off again."""
    clock = Clock()
    tier = open_tier(tmp_path, clock=clock)
    refs = chain(6)
    store(tier, refs[:2])
    size = bytes_in(tmp_path)
    write = os.pwritev

    def full(descriptor: int, parts: list[bytes], offset: int) -> int:
        write(descriptor, [parts[0]], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    assert store(tier, refs[2:]) == 0
    assert bytes_in(tmp_path) == size
    assert len(caplog.records) == 1 and not tier.stats.healthy
    assert tier.stats.problem == "it stores nothing: No space left on device"
    assert read(tier, refs) == refs[:2]
    monkeypatch.undo()
    assert store(tier, refs[2:3]) == 0
    clock.now += RETRY_SECONDS
    assert store(tier, refs[2:]) == 4 and tier.stats.healthy and not tier.stats.problem
    assert read(tier, refs) == refs
    tier.close()


def test_a_disk_that_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cleared is forgotten, even if its files can't go; nothing more is stored."""
    tier = open_tier(tmp_path)
    refs = chain(3)
    store(tier, refs)

    def broken(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "unlink", broken)
    tier.clear()
    assert read(tier, refs) == [] and store(tier, refs) == 0
    assert tier.stats.problem == "it stores nothing: Input/output error"
    monkeypatch.undo()
    tier.close()


def test_a_broken_disk_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """D3."""
    tier = open_tier(tmp_path)
    refs = chain(4)
    store(tier, refs[:2])

    def broken(descriptor: int, parts: list[bytes], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwritev", broken)
    assert store(tier, refs[2:]) == 0
    assert len(caplog.records) == 1 and not tier.stats.healthy
    assert read(tier, refs) == refs[:2]
    tier.close()


def test_a_read_that_fails_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1."""
    tier = open_tier(tmp_path)
    refs = chain(2)
    store(tier, refs)

    def broken(self: Segment, buffers: object, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Segment, "read", broken)
    assert read(tier, refs) == []
    assert tier.stats.failed_pages == 1 and not tier.holds(refs[0].key) and tier.holds(refs[1].key)
    tier.close()


def test_a_read_only_medium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is served; nothing is written, and nobody needs to be locked out."""
    tier = open_tier(tmp_path)
    refs = chain(3)
    store(tier, refs[:2])
    tier.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    really_open = os.open

    def refuse(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return really_open(path, flags, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    tier, other = open_tier(tmp_path), open_tier(tmp_path)
    assert read(tier, refs) == read(other, refs) == refs[:2]
    assert store(tier, refs) == 2 and not tier.stats.healthy and tier.stats.problem == "it is read-only"
    tier.clear()
    tier.close()
    other.close()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_secret_is_kept_and_kept_secret(tmp_path: Path) -> None:
    """D2, D4, H2: the same after a restart, another elsewhere; pages of another secret and leftovers are dropped."""
    first = CacheFolder(tmp_path / "a")
    assert (tmp_path / "a" / "secret").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    tier = DiskTier(first, BIG)
    refs = chain(2)
    store(tier, refs)
    tier.close()
    (tmp_path / "a" / "left.part").write_bytes(b"x")
    again = CacheFolder(tmp_path / "a")
    other = CacheFolder(tmp_path / "b")
    assert again.secret == first.secret != other.secret
    assert not (tmp_path / "a" / "left.part").exists()
    other.close()
    again.close()
    (tmp_path / "a" / "secret").write_bytes(b"damaged")
    tier = open_tier(tmp_path / "a")
    assert read(tier, refs) == [] and segments(tmp_path / "a") == []
    tier.close()


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    with pytest.raises(FolderInUseError, match="in use by another process"):
        CacheFolder(tmp_path)
    tier.close()
    open_tier(tmp_path).close()


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't use"):
        CacheFolder(tmp_path / "file")


def test_what_is_no_segment_is_dropped_and_other_files_are_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.joinpath("segment-000000000003.pages").write_bytes(b"\x80\x04 a pickle, perhaps" * 10)
    tmp_path.joinpath("notes.txt").write_text("mine")
    tier = open_tier(tmp_path)
    assert segments(tmp_path) == [] and len(caplog.records) == 1
    assert tmp_path.joinpath("notes.txt").exists()
    refs = chain(2)
    assert store(tier, refs) == 2 and read(tier, refs) == refs
    tier.close()


def test_a_read_goes_on_while_its_segment_is_evicted(tmp_path: Path) -> None:
    """D6: its file is deleted and what it names is gone; what it reads is right to its end."""
    tier = open_tier(tmp_path, 20_000)
    refs = chain(2)
    store(tier, refs)
    reading = tier.get(refs)
    next(reading)
    store(tier, chain(60, name=b"more"))
    assert not tier.holds(refs[0].key)
    assert (next(reading) == content(refs[1])).all()
    tier.close()


def test_the_system_is_told_only_of_what_lies_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file is read on it reads ahead by itself; being told as well takes twice its work."""
    size = 600_000  # more than half of what is read at a time
    tier, refs, others = open_tier(tmp_path, 1 << 30), chain(6), chain(2, name=b"b")
    for part in (refs[:3], others, refs[3:]):
        assert tier.put([(ref, content(ref, size)) for ref in part]) == len(part)
    told = list[int]()
    monkeypatch.setattr(Segment, "will_read", lambda self, offset, length: told.append(offset))
    assert read(tier, refs) == refs
    assert told == [tier._index[refs[3].key].offset]
