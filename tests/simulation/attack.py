"""Runs worlds by seed, and makes a world that fails smaller."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.simulation.spec import WorldSpec, draw_world
from tests.simulation.world import World


@dataclass(frozen=True, slots=True)
class Failure:
    """A world that went wrong.

    Attributes:
        requests: numbers of the requests that are enough to make it fail.
        error: the exception as text, with its traceback.
    """

    spec: WorldSpec
    requests: tuple[str, ...]
    error: str

    @property
    def command(self) -> str:
        return f"python -m tests.simulation --seed {self.spec.seed} --only {','.join(self.requests)}"

    def __str__(self) -> str:
        shown = [f"  {request}" for request in self.spec.requests[:6]]
        if len(self.spec.requests) > len(shown):
            shown.append(f"  ... and {len(self.spec.requests) - len(shown)} more")
        return "\n".join([self.error, repr(self.spec), *shown, f"replay: {self.command}"])


@dataclass(slots=True)
class Tally:
    """What has been run."""

    worlds: int = 0
    steps: int = 0
    requests: int = 0
    preemptions: int = 0

    def add(self, world: World) -> None:
        self.worlds += 1
        self.steps += world.steps
        self.requests += len(world.clients)
        self.preemptions += world.fairness.preemptions.total()


def attack(seed: int, tally: Tally | None = None) -> Failure | None:
    """Play a seed's world; None if nothing was wrong, else the smallest failing world found."""
    spec = draw_world(seed)
    error = play(spec, tally)
    return None if error is None else shrink(spec, error)


def play(spec: WorldSpec, tally: Tally | None = None) -> str | None:
    """Play a world; None if nothing was wrong, else what was."""
    log = logging.getLogger("pagetrie")
    level = log.level
    log.setLevel(logging.CRITICAL)  # planned failures aren't news
    world = World(spec)
    try:
        world.run()
    except Exception:  # noqa: BLE001  whatever it is, it is a find
        return f"in step {world.steps}: {traceback.format_exc()}"
    finally:
        log.setLevel(level)
        world.close()
        if tally is not None:
            tally.add(world)
    return None


def only(spec: WorldSpec, names: Sequence[str]) -> WorldSpec:
    """A world with some of its requests."""
    return replace(spec, requests=tuple(request for request in spec.requests if request.name in names))


def shrink(spec: WorldSpec, error: str) -> Failure:
    """Leave out requests, in halves and then smaller parts, as long as the world still fails."""
    names = [request.name for request in spec.requests]
    part = max(1, len(names) // 2)
    while True:
        for start in range(0, len(names), part):
            fewer = names[:start] + names[start + part :]
            still = play(only(spec, fewer)) if fewer else None
            if still is not None:
                names, error = fewer, still
                break
        else:
            if part == 1:
                return Failure(only(spec, names), tuple(names), error)
            part //= 2


def soak(seeds: range, steps: int | None, *, every_s: float = 5.0) -> tuple[Tally, list[Failure]]:
    """Play worlds until ``steps`` steps are done or the seeds end, with a line of progress now and then."""
    tally, failures = Tally(), list[Failure]()
    started, told = time.process_time(), time.monotonic()
    for seed in seeds:
        if steps is not None and tally.steps >= steps:
            break
        failure = attack(seed, tally)
        if failure is not None:
            failures.append(failure)
            print(f"seed {seed} fails\n{failure}", flush=True)
        if time.monotonic() - told >= every_s:
            told = time.monotonic()
            print(_line(tally, len(failures), time.process_time() - started), flush=True)
    print(_line(tally, len(failures), time.process_time() - started), flush=True)
    return tally, failures


def _line(tally: Tally, failures: int, seconds: float) -> str:
    rate = tally.steps / max(seconds, 1e-9)
    return (
        f"{tally.worlds:,} worlds, {tally.steps:,} steps, {tally.requests:,} requests, "
        f"{tally.preemptions:,} preemptions, {failures} failures; {rate:,.0f} steps per second of CPU"
    )
