"""Pages on a local disk, in segment files: a log whose oldest segment makes room, hot pages written once more.

What is read is verified; what doesn't verify is dropped. Nothing waits for the disk to have it in safety: a page lost
with the power is a miss. A kill loses at most what was still in the queue.
"""

from __future__ import annotations

import errno
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import numpy as np

from pagetrie.kv.keys import ChainKeys, tag_of
from pagetrie.kv.shares import Allowance
from pagetrie.kv.tiers.folder import CacheFolder
from pagetrie.kv.tiers.interface import Bytes, PageRef, Speed, TierStats, TierTraits
from pagetrie.kv.tiers.namespaces import MAX_BYTES, read_namespaces, write_namespaces
from pagetrie.kv.tiers.owners import Owners
from pagetrie.kv.tiers.record import Checksum, Head, matches, pack_head, parse_head
from pagetrie.kv.tiers.segment import HEADER_BYTES, TRAILER_BYTES, Segment, SegmentError

log = logging.getLogger(__name__)

SEGMENTS = 128
"""Segments that the capacity is cut into: as many files stay open, and one of them makes room at a time."""

RETRY_SECONDS = 30.0
"""How long nothing is written after the disk was full."""

REWRITTEN_SEGMENTS = 4
"""Most segments' worth of pages that are written anew to make room once."""

FLOORS = 0.75
"""How much of the capacity owners' floors keep at most, together: the rest is room to move in."""

CLOSE_SECONDS = 2.0
"""How long a write that hangs in the system is waited for, to close or to clear."""

READ_BYTES = 1 << 20
"""Bytes that are read at a time: few enough to be checked while the processor's cache still holds them."""

_RUNS_AHEAD = 8

_NAME = re.compile(r"segment-(\d{12})\.pages")


def segment_paths(folder: Path) -> list[Path]:
    """The segment files of a folder, oldest first."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


class _Entry:
    """Where a page is. ``used``: the round in which it was last used, -1 for never."""

    __slots__ = ("head_bytes", "offset", "owner", "page_bytes", "parent", "segment", "used")

    def __init__(self, segment: Segment, offset: int, head: Head) -> None:
        self.segment = segment
        self.offset = offset
        self.head_bytes = head.size
        self.page_bytes = head.page_bytes
        self.parent = head.ref.parent
        self.owner = tag_of(head.ref.namespace)
        self.used = -1

    @property
    def size(self) -> int:
        return self.head_bytes + self.page_bytes


def _size(run: Sequence[_Entry]) -> int:
    return sum(entry.size for entry in run)


def _adjoin(first: _Entry, second: _Entry) -> bool:
    return first.segment is second.segment and first.offset + first.size == second.offset


def _runs(entries: Sequence[_Entry]) -> list[list[_Entry]]:
    """Cut into runs of records that lie side by side, of at most ``READ_BYTES`` if they are several."""
    runs: list[list[_Entry]] = []
    size = 0
    for entry in entries:
        if runs and _adjoin(runs[-1][-1], entry) and size + entry.size <= READ_BYTES:
            runs[-1].append(entry)
            size += entry.size
        else:
            runs.append([entry])
            size = entry.size
    return runs


class DiskTier:
    """Pages on disk (``Tier``).

    Room is made by giving up the oldest segment. Those of its pages that were used during the last round over all
    segments are written anew, the most recently used ones first, as long as that makes room at all. A use of a page
    counts for all before it, so what stays is a usable prefix. Pages within their owners' floors are written anew in
    any case. An owner at its cap gives up its own oldest pages, but for those used of late; their bytes are free with
    their segments.

    Args:
        folder: where; held by this tier and closed with it.
        capacity: most bytes of all files together.
        clock: seconds.
    """

    name = "disk"
    traits = TierTraits(speed=Speed(1e-3, 1e9))

    def __init__(self, folder: CacheFolder, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._clock = clock
        self._seal = Checksum()
        # A segment, with its index, is kept free for pages that are written anew while their old file is still there.
        self._segment_bytes = max(1, capacity // SEGMENTS, min(4 << 20, capacity // 8))
        self._reserve = self._segment_bytes + self._segment_bytes // 4
        self._limit = capacity - self._reserve - min(MAX_BYTES, capacity // 64)
        self._capacity = capacity
        self._index: dict[bytes, _Entry] = {}
        # Per owner its pages, oldest first.
        self._lines: dict[bytes, OrderedDict[bytes, None]] = {}
        self._owners = Owners(self._limit, FLOORS)
        self._lock = Lock()  # the index; held for moments
        self._writing = Lock()  # one writer at a time
        self._to_be_cleared = False
        self._segments: list[Segment] = []
        self._next_number = 0
        self._round = 0
        self._writable = folder.writable
        self._problem = "" if folder.writable else "it is read-only"
        self._retry_at = 0.0
        self._stats = TierStats(capacity_bytes=capacity)
        self._namespaces = read_namespaces(folder.path, ChainKeys(folder.secret))
        self._load()

    # -- start -------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        names = segment_paths(self.folder.path)
        for path in names:
            self._next_number = int(path.name[8:20]) + 1
            try:
                segment = Segment.open(path, self.folder.secret_name, writable=self._writable)
                for offset, head in segment.records(self._seal):
                    self._enter(head.ref.key, _Entry(segment, offset, head))
                if self._writable and not (segment.sealed and segment.size >= self._segment_bytes):
                    segment.reopen()
                if self._writable and path != names[-1]:
                    segment.seal(self._seal)
            except (SegmentError, OSError) as error:
                log.warning("a segment of the disk cache is of no use and dropped: %s", error)
                for key, entry in list(self._index.items()):
                    if entry.segment.path == path:
                        self._drop(key, entry)
                if self._writable:
                    path.unlink(missing_ok=True)
                continue
            self._segments.append(segment)
        if self._writable:
            with self._writing:
                self._make_room(0)

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> TierStats:
        stats = self._stats
        stats.pages = len(self._index)
        stats.used_bytes = sum(segment.size for segment in self._segments)
        stats.healthy = self._writable and self._clock() >= self._retry_at
        stats.problem = "" if stats.healthy else self._problem
        return stats

    def holds(self, key: bytes) -> bool:
        return key in self._index

    def contains(self, keys: Sequence[bytes]) -> int:
        index = self._index
        return next((count for count, key in enumerate(keys) if key not in index), len(keys))

    def get(self, refs: Sequence[PageRef]) -> Iterator[Bytes]:
        with self._lock:
            entries = [self._index.get(ref.key) for ref in refs]
        there = next((count for count, entry in enumerate(entries) if entry is None), len(refs))
        runs = _runs([entry for entry in entries[:there] if entry is not None])
        started = self._clock()
        for ref, entry, front, data in self._read_ahead(refs, runs):
            if not matches(parse_head(front, self._seal), ref, data, self._seal):
                self._drop(ref.key, entry)
                self._stats.failed_pages += 1
                return
            self.touch(ref.key)
            self._stats.hit_pages += 1
            self._stats.hit_bytes += data.nbytes
            self._stats.get_seconds += self._clock() - started
            yield np.frombuffer(data, np.uint8)
            started = self._clock()
        self._stats.failed_pages += there < len(refs)

    def _read_ahead(
        self, refs: Sequence[PageRef], runs: Sequence[Sequence[_Entry]]
    ) -> Iterator[tuple[PageRef, _Entry, memoryview, memoryview]]:
        """Records in order, unverified, as (name, entry, head, page).

        The system reads ahead: by itself where a file is read on, which takes it half the work that it has if it is
        told to. Where a run lies elsewhere it is told.
        """
        buffer = memoryview(bytearray(max((_size(run) for run in runs), default=0)))
        position = 0
        for number, run in enumerate(runs):
            for place in range(number + (_RUNS_AHEAD if number else 1), min(number + _RUNS_AHEAD + 1, len(runs))):
                later = runs[place]
                if not _adjoin(runs[place - 1][-1], later[0]):
                    later[0].segment.will_read(later[0].offset, _size(later))
            try:
                count = run[0].segment.read([buffer[: _size(run)]], run[0].offset)
            except OSError as error:
                log.warning("the disk cache can't be read: %s", error)
                count = 0
            data, start = buffer[:count], 0
            for entry in run:
                front, end = start + entry.head_bytes, start + entry.size
                yield refs[position], entry, data[start:front], data[front:end]
                position, start = position + 1, end

    def _enter(self, key: bytes, entry: _Entry) -> None:
        """A page is where the entry says, and nowhere else any more."""
        entry.segment.keys.append(key)
        entry.segment.owners.add(entry.owner)
        with self._lock:
            before = self._index.get(key)
            if before is not None:
                self._owners.remove(before.owner, before.size)
            self._index[key] = entry
            self._lines.setdefault(entry.owner, OrderedDict())[key] = None
            self._owners.add(entry.owner, entry.size)

    def _drop(self, key: bytes, entry: _Entry) -> bool:
        """Forget a page, unless it is elsewhere by now."""
        with self._lock:
            if self._index.get(key) is not entry:
                return False
            del self._index[key]
            line = self._lines[entry.owner]
            del line[key]
            if not line:
                del self._lines[entry.owner]
            self._owners.remove(entry.owner, entry.size)
            return True

    def touch(self, key: bytes) -> None:
        with self._lock:
            entry = self._index.get(key)
            # Ancestors were used in the same round if this page was.
            while entry is not None and entry.used != self._round:
                entry.used = self._round
                entry = self._index.get(entry.parent)

    # -- writing -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _writer(self) -> Iterator[None]:
        """The one writer; at its end what was cleared meanwhile is deleted."""
        with self._writing:
            try:
                yield
            finally:
                if self._to_be_cleared:
                    self._delete_all()

    def put(self, pages: Sequence[tuple[PageRef, Bytes]]) -> int:
        stored, started = 0, self._clock()
        with self._writer():
            for ref, data in pages:
                if ref.key in self._index:
                    stored += 1
                elif self._store(ref, data):
                    stored += 1
                    self._stats.stored_pages += 1
                    self._stats.stored_bytes += data.nbytes
                else:
                    self._stats.refused_pages += 1
        self._stats.put_seconds += self._clock() - started
        return stored

    def _store(self, ref: PageRef, data: Bytes) -> bool:
        if not self._writable or self._clock() < self._retry_at:
            return False
        head = pack_head(ref, data.data, self._seal)
        size = len(head) + data.nbytes
        # Each record also stands in its segment's index.
        if HEADER_BYTES + size + 2 * len(head) > self._limit or not self._keep_cap(tag_of(ref.namespace), size):
            return False
        try:
            self._make_room(size + 2 * len(head))
            self._append(head, data, used=-1)
        except OSError as error:
            self._give_way(error)
            return False
        return True

    def _append(self, front: bytes, data: Bytes, *, used: int) -> None:
        size = len(front) + data.nbytes
        current = self._segments[-1] if self._segments else None
        if current is None or current.sealed or current.size + size > max(self._segment_bytes, HEADER_BYTES + size):
            if current is not None:
                current.seal(self._seal)
            path = self.folder.path / f"segment-{self._next_number:012d}.pages"
            self._next_number += 1
            current = Segment.create(path, self.folder.secret_name)
            self._round += 1
            self._segments.append(current)
        offset = current.append(front, data.data)
        head = parse_head(front, self._seal)
        assert head is not None
        entry = _Entry(current, offset, head)
        entry.used = used
        self._enter(head.ref.key, entry)

    def _keep_cap(self, owner: bytes, size: int = 0) -> bool:
        """Give up an owner's oldest pages until so many bytes more are within its cap; False if they never are."""
        while self._owners.above_cap(owner, size):
            with self._lock:
                key = next(iter(self._lines.get(owner, ())), None)
                if key is None:
                    return False
                entry = self._index[key]
                if entry.used >= 0 and entry.used >= self._round - len(self._segments):
                    # Used of late: it stays once more.
                    entry.used = -1
                    self._lines[owner].move_to_end(key)
                    continue
            self._stats.evicted_pages += self._drop(key, entry)
        return True

    def _make_room(self, size: int) -> None:
        """Give up the oldest segments until ``size`` more bytes fit."""

        def taken() -> int:
            return sum(segment.size + segment.index_bytes() for segment in self._segments)

        budget = REWRITTEN_SEGMENTS * self._segment_bytes
        # Once around at most: floors keep less than all, so there is room by then.
        around = len(self._segments) + 1
        while self._segments and taken() + HEADER_BYTES + size > self._limit:
            victim = self._segments.pop(0)
            entries = self._entries_in(victim)
            around -= 1
            kept = self._within_floors(entries) if around > 0 else set[bytes]()
            if self._segments:
                kept_bytes = sum(entry.size for key, entry in entries if key in kept)
                for key, entry in self._worth(entries, kept, min(budget + kept_bytes, self._reserve)):
                    budget -= 0 if key in kept else entry.size
                    self._write_anew(key, entry)
            self._stats.evicted_pages += sum(self._drop(key, entry) for key, entry in entries)
            victim.path.unlink(missing_ok=True)

    def _entries_in(self, segment: Segment) -> list[tuple[bytes, _Entry]]:
        """The pages that are in a segment and nowhere else."""
        with self._lock:
            found = [(key, self._index.get(key)) for key in dict.fromkeys(segment.keys)]
        return [(key, entry) for key, entry in found if entry is not None and entry.segment is segment]

    def _within_floors(self, entries: list[tuple[bytes, _Entry]]) -> set[bytes]:
        """Those of a segment's pages that their owners would be below their floors without. Their later ones go first:
        a prefix is of use without its end."""
        kept: set[bytes] = set()
        gone: dict[bytes, int] = {}
        for key, entry in reversed(entries):
            less = gone.get(entry.owner, 0) + entry.size
            if self._owners.may_lose(entry.owner, less):
                gone[entry.owner] = less
            else:
                kept.add(key)
        return kept

    def _worth(self, entries: list[tuple[bytes, _Entry]], kept: set[bytes], room: int) -> list[tuple[bytes, _Entry]]:
        """The pages of a segment to write anew, in ``room`` bytes: those to be kept, then what was used of late.

        Parents come before what stands on them.
        """
        oldest = self._round - len(self._segments) - 1
        hot = [pair for pair in entries if pair[0] in kept or (pair[1].used >= 0 and pair[1].used >= oldest)]
        room -= 2 * HEADER_BYTES + 2 * TRAILER_BYTES  # a new segment may have to be begun, twice
        hot.sort(key=lambda pair: (pair[0] not in kept, -pair[1].used, pair[1].offset))
        for count, (_, entry) in enumerate(hot):
            room -= entry.size + entry.head_bytes
            if room < 0:
                return hot[:count]
        return hot

    def _write_anew(self, key: bytes, entry: _Entry) -> None:
        front, data = bytearray(entry.head_bytes), np.empty(entry.page_bytes, np.uint8)
        if entry.segment.read([front, data.data], entry.offset) == entry.size:
            head = parse_head(front, self._seal)
            if head is not None and matches(head, head.ref, data.data, self._seal) and head.ref.key == key:
                self._append(bytes(front), data, used=entry.used)

    def _give_way(self, error: OSError) -> None:
        """A write failed: wait a while if the disk is full, and write nothing more if it is broken or read-only."""
        self._problem = f"it stores nothing: {error.strerror or type(error).__name__}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._retry_at = self._clock() + RETRY_SECONDS
            log.warning("the disk cache can't store pages for %.0f s: %s", RETRY_SECONDS, error)
        else:
            self._writable = False
            log.warning("the disk cache stores nothing more: %s", error)

    def name_namespace(self, key: bytes, namespace: bytes) -> None:
        with self._writer():
            size = sum(map(len, self._namespaces.values())) + len(namespace) + 4 * (len(self._namespaces) + 1)
            if key in self._namespaces or not self._writable or size > min(MAX_BYTES, self._capacity // 64):
                return
            self._namespaces[key] = namespace
            try:
                write_namespaces(self.folder.path, list(self._namespaces.values()))
            except OSError as error:
                self._give_way(error)

    def allow(self, allowances: Mapping[bytes, Allowance]) -> None:
        with self._writer():
            with self._lock:
                self._owners.allow(allowances)
                lines = list(self._lines)
            for owner in lines:
                self._keep_cap(owner)

    def drop_owner(self, tag: bytes) -> None:
        """See ``Tier``. Segments that hold anything of the owner's are written anew without it."""
        with self._writer():
            with self._lock:
                entries = [(key, self._index[key]) for key in self._lines.get(tag, ())]
            for key, entry in entries:
                self._drop(key, entry)
            if not self._writable:
                return
            try:
                if any(tag_of(key) == tag for key in self._namespaces):
                    self._namespaces = {key: of for key, of in self._namespaces.items() if tag_of(key) != tag}
                    write_namespaces(self.folder.path, list(self._namespaces.values()))
                for segment in [segment for segment in self._segments if tag in segment.owners]:
                    if segment is self._segments[-1]:
                        segment.seal(self._seal)  # nothing more comes into it
                    for key, entry in self._entries_in(segment):
                        self._write_anew(key, entry)
                        self._drop(key, entry)
                    self._segments.remove(segment)
                    segment.path.unlink(missing_ok=True)
            except OSError as error:
                self._give_way(error)

    def clear(self) -> None:
        """See ``Tier``. The files of a writer that hangs go when it ends: it keeps nobody waiting for long."""
        self._forget_all()
        self._to_be_cleared = True
        if self._writing.acquire(timeout=CLOSE_SECONDS):
            try:
                self._delete_all()
            finally:
                self._writing.release()

    def _delete_all(self) -> None:
        self._to_be_cleared = False
        self._forget_all()
        try:
            for segment in self._segments:
                if self.folder.writable:
                    segment.path.unlink(missing_ok=True)
        except OSError as error:
            self._give_way(error)
        self._segments.clear()

    def close(self) -> None:
        # A writer that hangs in the system must not keep us here; its segment is then read record by record.
        if self._writing.acquire(timeout=CLOSE_SECONDS):
            if self._writable and self._segments:
                try:
                    self._segments[-1].seal(self._seal)
                except OSError as error:
                    self._give_way(error)
            self._segments.clear()
            self._writing.release()
        self._writable = False
        self._forget_all()
        self.folder.close()

    def _forget_all(self) -> None:
        with self._lock:
            self._index.clear()
            self._lines.clear()
            self._owners.clear()
