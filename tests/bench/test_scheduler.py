"""The benchmark of a step measures the state that it says."""

from __future__ import annotations

import pytest

from bench.scheduler import measure


@pytest.mark.parametrize("waiting", [0, 3])
def test_it_measures_decode_steps_of_all_that_run(waiting: int) -> None:
    cost = measure(4, waiting, steps=40)  # raises if a step has other outputs than one for each
    assert (cost.running, cost.waiting) == (4, waiting)
    assert 0 < cost.schedule < cost.step
