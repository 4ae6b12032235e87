"""How fast loads may go beside steps."""

from __future__ import annotations

import pytest

from pagetrie.kv.tiers.workers import REST, SLICE, Pace


class Core:
    """A thread's time on a core, and what it slept."""

    def __init__(self) -> None:
        self.used, self.slept = 0.0, list[float]()
        self.pace = Pace(lambda: self.used, self.slept.append)


def test_it_rests_in_proportion_to_what_it_computed_while_steps_compute() -> None:
    core = Core()
    core.pace.slow = True
    rest = core.pace.begin()
    for _ in range(4):
        core.used += 0.75 * SLICE
        rest()
    assert core.slept == pytest.approx([1.5 * SLICE * REST] * 2)


def test_it_never_rests_while_no_step_computes_and_owes_nothing_afterwards() -> None:
    core = Core()
    rest = core.pace.begin()
    core.used += 50 * SLICE
    rest()
    core.pace.slow = True
    rest()
    assert core.slept == []
    core.used += 2 * SLICE
    rest()
    assert core.slept == pytest.approx([2 * SLICE * REST])


def test_a_piece_of_work_pays_for_itself_alone() -> None:
    core = Core()
    core.pace.slow = True
    core.pace.begin()
    core.used += 50 * SLICE
    core.pace.begin()()
    assert core.slept == []
