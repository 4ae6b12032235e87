"""How fast loads may go beside steps."""

from __future__ import annotations

import pytest

from pagetrie.kv.tiers.workers import REST, SLICE, Course, Pace


class Core:
    """A thread's time on a core, and what it slept."""

    def __init__(self) -> None:
        self.used, self.slept = 0.0, list[float]()
        self.pace = Pace(lambda: self.used, self.slept.append)


def test_it_rests_in_proportion_to_what_it_computed_while_steps_compute() -> None:
    core = Core()
    core.pace.slow = True
    course = Course(core.pace)
    for _ in range(4):
        core.used += 0.75 * SLICE
        course.rest()
    assert core.slept == pytest.approx([1.5 * SLICE * REST] * 2)
    assert course.rested == pytest.approx(3 * SLICE * REST)
    assert course.computed == pytest.approx(3 * SLICE)


def test_it_never_rests_while_no_step_computes_and_owes_nothing_afterwards() -> None:
    core = Core()
    course = Course(core.pace)
    core.used += 50 * SLICE
    course.rest()
    core.pace.slow = True
    course.rest()
    assert core.slept == []
    core.used += 2 * SLICE
    course.rest()
    assert core.slept == pytest.approx([2 * SLICE * REST])


def test_a_piece_of_work_pays_for_itself_alone() -> None:
    core = Core()
    core.pace.slow = True
    Course(core.pace)
    core.used += 50 * SLICE
    Course(core.pace).rest()
    assert core.slept == []
