"""Host memory for pages that the pool evicted: one block, cut into slots; of the owner that gives, the least recently
used goes first."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock

import numpy as np

from pagetrie.errors import ConfigError
from pagetrie.kv.keys import tag_of
from pagetrie.kv.shares import Allowance
from pagetrie.kv.tiers.codec import PageCodec
from pagetrie.kv.tiers.interface import Bytes, PageRef, Speed, TierStats, TierTraits
from pagetrie.kv.tiers.owners import Owners

ENTRY_BYTES = 512
"""What a page costs besides its bytes (its key, its entry), rounded up; counted against the capacity."""


class RamTier:
    """Pages in memory (``Tier``). Memory is reserved at once and taken as it is first used.

    A page that is handed out stays, so that evicting it again costs no copy; a slot that is being read is never
    reused. With a codec, pages are encoded when they come (by the thread that brings them) and decoded when they go;
    counts of bytes are of what they take here. One that can't be encoded is refused.

    Args:
        capacity: bytes, entries included.
        bytes_per_page: bytes of a page in the pool.
        clock: seconds.
        codec: how to keep pages; None for as they are.

    Raises:
        ConfigError: the capacity doesn't hold one page.
        ValueError: the codec is for pages of another size.
    """

    name = "ram"
    traits = TierTraits(victim=True, speed=Speed(1e-4, 3e9))

    def __init__(
        self,
        capacity: int,
        bytes_per_page: int,
        clock: Callable[[], float] = time.monotonic,
        codec: PageCodec | None = None,
    ) -> None:
        if codec is not None and codec.page_bytes != bytes_per_page:
            raise ValueError(f"pages have {bytes_per_page} bytes, the codec is for {codec.page_bytes}")
        slot_bytes = bytes_per_page if codec is None else codec.encoded_bytes
        slots = capacity // (slot_bytes + ENTRY_BYTES)
        if slots < 1:
            raise ConfigError(f"a RAM cache of {capacity} bytes holds no page: one takes {slot_bytes} bytes")
        self._slot_bytes = slot_bytes
        self._codec = codec
        self._clock = clock
        self._memory = np.empty((slots, slot_bytes), np.uint8)
        self._free = list(range(slots - 1, -1, -1))
        # Key -> owner and slot; per owner its keys, the least recently used first.
        self._slots: dict[bytes, tuple[bytes, int]] = {}
        self._lines: dict[bytes, OrderedDict[bytes, None]] = {}
        self._owners = Owners(slots * slot_bytes)
        self._readers: dict[int, int] = {}
        # Forgotten while they were being read: free as soon as that ends.
        self._orphans: set[int] = set()
        self._lock = Lock()
        self._stats = TierStats(capacity_bytes=capacity)

    @property
    def stats(self) -> TierStats:
        stats = self._stats
        stats.pages = len(self._slots)
        stats.used_bytes = stats.pages * (self._slot_bytes + ENTRY_BYTES)
        return stats

    def holds(self, key: bytes) -> bool:
        return key in self._slots

    def contains(self, keys: Sequence[bytes]) -> int:
        count = 0
        with self._lock:
            for key in keys:
                if key not in self._slots:
                    break
                count += 1
            # What is about to be asked for must not be what the next eviction from the pool pushes out.
            for key in reversed(keys[:count]):
                self._use(key)
        return count

    def get(self, refs: Sequence[PageRef]) -> Iterator[Bytes]:
        codec = self._codec
        decoded = None if codec is None else np.empty(codec.page_bytes, np.uint8)
        for ref in refs:
            with self._lock:
                found = self._slots.get(ref.key)
                if found is None:
                    self._stats.failed_pages += 1
                    return
                slot = found[1]
                self._use(ref.key)
                self._readers[slot] = self._readers.get(slot, 0) + 1
            started = self._clock()
            try:
                data: Bytes = self._memory[slot]
                if codec is not None and decoded is not None:
                    codec.decode(data, decoded)
                    data = decoded
                yield data
            finally:
                with self._lock:
                    self._readers[slot] -= 1
                    if not self._readers[slot]:
                        del self._readers[slot]
                        if slot in self._orphans:
                            self._orphans.remove(slot)
                            self._free.append(slot)
                    self._stats.hit_pages += 1
                    self._stats.hit_bytes += self._slot_bytes
                    self._stats.get_seconds += self._clock() - started

    def put(self, pages: Sequence[tuple[PageRef, Bytes]]) -> int:
        started = self._clock()
        stored = 0
        for ref, data in pages:
            with self._lock:
                if ref.key in self._slots:
                    self._use(ref.key)
                    stored += 1
                    continue
                owner = tag_of(ref.namespace)
                slot = self._take_slot(owner)
                if slot is None:
                    self._stats.refused_pages += 1
                    continue
            # Not findable yet and not free any more: nobody else touches this slot.
            if not self._fill(slot, data):
                with self._lock:
                    self._free.append(slot)
                    self._stats.refused_pages += 1
                continue
            with self._lock:
                if ref.key in self._slots:  # somebody else was faster
                    self._free.append(slot)
                else:
                    self._slots[ref.key] = owner, slot
                    self._lines.setdefault(owner, OrderedDict())[ref.key] = None
                    self._owners.add(owner, self._slot_bytes)
                self._stats.stored_pages += 1
                self._stats.stored_bytes += self._slot_bytes
            stored += 1
        self._stats.put_seconds += self._clock() - started
        return stored

    def _fill(self, slot: int, data: Bytes) -> bool:
        if self._codec is not None:
            return self._codec.encode(data, self._memory[slot])
        self._memory[slot] = data
        return True

    def _use(self, key: bytes) -> None:
        self._lines[self._slots[key][0]].move_to_end(key)

    def _take_slot(self, taker: bytes) -> int | None:
        if self._owners.above_cap(taker, self._slot_bytes):
            return self._evict(taker)
        if self._free:
            return self._free.pop()
        giver = self._owners.giver(taker)
        return None if giver is None else self._evict(giver)

    def _evict(self, owner: bytes) -> int | None:
        """Take an owner's least recently used slot that nobody reads."""
        for key in self._lines.get(owner, ()):
            slot = self._slots[key][1]
            if slot not in self._readers:
                self._remove(key)
                self._stats.evicted_pages += 1
                return slot
        return None

    def _remove(self, key: bytes) -> int:
        """Forget a page; returns its slot."""
        owner, slot = self._slots.pop(key)
        del self._lines[owner][key]
        if not self._lines[owner]:
            del self._lines[owner]
        self._owners.remove(owner, self._slot_bytes)
        return slot

    def touch(self, key: bytes) -> None:
        """Nothing: what is used in the pool isn't needed here, and comes back when it is evicted there."""

    def name_namespace(self, key: bytes, namespace: bytes) -> None:
        """Nothing: pages here are never named anew."""

    def allow(self, allowances: Mapping[bytes, Allowance]) -> None:
        with self._lock:
            self._owners.allow(allowances)
            for owner in list(self._lines):
                while self._owners.above_cap(owner) and (slot := self._evict(owner)) is not None:
                    self._free.append(slot)

    def drop_owner(self, tag: bytes) -> None:
        with self._lock:
            for key in list(self._lines.get(tag, ())):
                self._release(self._remove(key))

    def _release(self, slot: int) -> None:
        if slot in self._readers:
            self._orphans.add(slot)
        else:
            self._free.append(slot)

    def clear(self) -> None:
        with self._lock:
            for key in list(self._slots):
                self._release(self._remove(key))

    def close(self) -> None:
        self.clear()
