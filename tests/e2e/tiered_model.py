"""The real model over one tier whose medium does as it is told, in time that passes only when told to."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from pagetrie.assembly import Parts
from pagetrie.engine.engine import Engine
from pagetrie.engine.output import RequestOutput
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.engine.runner import SequenceResult, StepPlan
from pagetrie.kv import CacheManager
from pagetrie.kv.keys import SECRET_BYTES, ChainKeys
from pagetrie.kv.tiers.disk import DiskTier, segment_paths
from pagetrie.kv.tiers.folder import CacheFolder
from pagetrie.kv.tiers.interface import Bytes, PageRef, Tier
from pagetrie.kv.tiers.ram import ENTRY_BYTES, RamTier
from pagetrie.kv.tiers.stack import TierStack
from pagetrie.kv.tiers.store import StoreTier
from pagetrie.kv.tiers.workers import Pace
from pagetrie.kv.transfers import Transfers
from pagetrie.sim.clock import VirtualClock
from tests.kv.tiers.faults import FaultyBackend, Turns

SECRET = bytes(SECRET_BYTES)
PREFILL_SPEED = 100.0
"""Tokens that a step computes per second of the world's time."""

STALL = 10.0


class TieredModel:
    """An engine over the model, with one real tier below its pool.

    Every step's invariants are checked. The model computes as ever; its time is counted by tokens.

    Args:
        parts: the model; its storage is this world's pool.
        tier: which.
        folder: for what the disk tier writes.
        queue_pages: pages that may wait to be written.

    Attributes:
        faults: what goes wrong in reading ("get"), in writing ("put") or, of a store, in asking ("exists"), until it is
            taken out. In every tier "get" may "lie" (nothing comes), "die", "stall" (for ``STALL`` seconds, half-way)
            or be "slow" (10 ms). See ``_Ram``, ``_disk_faults`` and ``FaultyBackend`` for the rest.
        computed: tokens that the model has computed.
    """

    def __init__(self, parts: Parts, tier: str, folder: Path, *, num_pages: int = 30, queue_pages: int = 30) -> None:
        self.clock = VirtualClock()
        self.turns = Turns(self.clock, self.clock)
        self.faults: dict[str, str] = {}
        self.computed = 0
        self.folder = folder
        self._parts = parts
        self._numbers = iter(range(10**6))
        self._execute = parts.engine._runner.execute
        self.storage = parts.engine._runner.storage  # type: ignore[attr-defined]
        assert num_pages <= self.storage.num_pages
        self.bytes_per_page: int = self.storage.bytes_per_page
        self.tier = self._open(tier)
        stack = TierStack(
            [self.tier],
            self.storage,
            queue_bytes=queue_pages * self.bytes_per_page,
            clock=self.clock,
            make_worker=self.turns.make_worker,
            pace=Pace.free(),
        )
        self.transfers = Transfers(stack, ChainKeys(SECRET))
        self.transfers.note_prefill(1, 0, 1 / PREFILL_SPEED)
        self.cache = CacheManager(num_pages=num_pages, page_size=parts.cache.page_size, transfers=self.transfers)
        self.engine = Engine(
            runner=self,
            cache=self.cache,
            vocabulary=parts.tokenizer,
            config=parts.engine.config,
            clock=self.clock,
            rng=random.Random(0),
        )
        self.last: dict[str, RequestOutput] = {}
        self.tokens: dict[str, list[int]] = {}

    def _open(self, tier: str) -> Tier:
        size = self.bytes_per_page
        if tier == "ram":
            return _Ram(self, 40 * (size + ENTRY_BYTES), size, self.clock)
        if tier == "disk":
            return DiskTier(CacheFolder(self.folder, SECRET), 64 << 20, self.clock)
        self.backend = FaultyBackend(self._store_fault, random.Random(0), 1000)
        return StoreTier(self.backend, secret=SECRET, bytes_per_page=size, title="world", clock=self.clock)

    # -- faults ------------------------------------------------------------------------------------------------------

    def stall(self, call: str) -> None:
        """Where a medium stops if it is told to."""
        fault = self.faults.get(call)
        if fault in ("stall", "slow"):
            self.turns.stop(STALL if fault == "stall" else 0.01)

    def _store_fault(self, call: str) -> str:
        self.stall(call)
        return self.faults.get(call, "")

    # -- the model, as a runner --------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> list[SequenceResult]:
        results = self._execute(plan)
        count = sum(len(share.token_ids) for share in plan.sequences)
        self.computed += count
        self.clock.advance(count / PREFILL_SPEED)
        return results

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, prompt: Sequence[int], max_tokens: int = 4) -> str:
        name = f"r{next(self._numbers)}"
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add(Request(name, list(prompt), params))
        self.tokens[name] = []
        return name

    def step(self) -> None:
        """What is due on the tiers' threads, then a step, or a pause if all wait for pages."""
        self.turns.run()
        pause = self.engine.pause()
        if pause:
            due = self.turns.next_due()
            self.clock.advance(pause if due is None else max(0.0, min(pause, due - self.clock.now)))
            self.turns.run()
        for output in self.engine.step():
            self.last[output.request_id] = output
            assert output.error is None
            for delta in output.choices:
                self.tokens[output.request_id] += delta.token_ids
        self.cache.check()

    def ask(self, *prompts: Sequence[int]) -> list[str]:
        """Serve prompts, all at once, however the tier is; their names."""
        names = [self.add(prompt) for prompt in prompts]
        self.finish()
        return names

    def begin_load(self) -> None:
        """Step until the tier has promised pages, and stop before any of them is read."""
        loads = self.transfers.stats.loads
        while self.transfers.stats.loads == loads:
            self.turns.run()
            self.engine.step()

    def finish(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(1000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("still busy after 1000 steps")

    def forget_pool(self) -> None:
        """Evict everything, and let the threads do what they have to."""
        self.cache.index.evict(self.cache.index.cached_pages)
        self.settle()

    def settle(self) -> None:
        """Let time pass until the threads have nothing to do; then every page must be back."""
        self.turns.finish()
        self.engine.settle()
        self.cache.check()
        stats = self.cache.stats()
        assert stats.loading_pages == stats.active_pages == 0
        assert stats.free_pages + stats.cached_pages == stats.total_pages

    def close(self) -> None:
        self.turns.end()
        self.tier.close()


class _Ram(RamTier):
    """A memory tier; "get" may also give "half" of the pages, or one that is "cut" short."""

    def __init__(self, world: TieredModel, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._world = world

    def get(self, refs: Sequence[PageRef]) -> Iterator[Bytes]:
        fault = self._world.faults.get("get")
        half = len(refs) // 2
        for number, data in enumerate(super().get(refs if fault != "lie" else [])):
            if number == half and fault == "half":
                return
            if number == half and fault == "die":
                raise OSError("planted")
            if number == half:
                self._world.stall("get")
            yield data[:-16] if number == half and fault == "cut" else data


def disk_faults(world: TieredModel, patch: pytest.MonkeyPatch) -> None:
    """Have the system's calls on files fail as the world says: both may "die" (EIO), "get" may "lie" (as if the file
    had ended), and "put" find the disk "full" when half of it is written."""
    read, write = os.preadv, os.pwritev

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        world.stall("get")
        fault = world.faults.get("get")
        if fault == "die":
            raise OSError(errno.EIO, "Input/output error")
        return 0 if fault == "lie" else read(descriptor, buffers, offset)

    def pwritev(descriptor: int, parts: list[bytes], offset: int) -> int:
        world.stall("put")
        fault = world.faults.get("put")
        if fault == "die":
            raise OSError(errno.EIO, "Input/output error")
        if fault == "full":
            whole = b"".join(parts)
            os.pwrite(descriptor, whole[: len(whole) // 2], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, parts, offset)

    patch.setattr(os, "preadv", preadv)
    patch.setattr(os, "pwritev", pwritev)


def damage_page(world: TieredModel, number: int, how: str) -> None:
    """Damage the ``number``-th stored page in a disk tier's file: "flip" a bit, "cut" the file there, or put another
    page's whole record in its place ("swap")."""
    assert isinstance(world.tier, DiskTier)
    entries = list(world.tier._index.values())
    entry, other = entries[number], entries[number - 1]
    path = entry.segment.path
    assert path in segment_paths(world.folder) and entry.size == other.size
    with path.open("r+b") as file:
        if how == "cut":
            file.truncate(entry.offset + entry.size // 2)
            return
        file.seek(other.offset)
        record = np.frombuffer(file.read(other.size), np.uint8)
        if how == "flip":
            file.seek(entry.offset)
            record = np.frombuffer(file.read(entry.size), np.uint8).copy()
            record[len(record) // 2] ^= 16
        file.seek(entry.offset)
        file.write(record.tobytes())
