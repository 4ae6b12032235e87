"""Random worlds: nothing may ever be wrong in one. More of them: ``make soak``."""

from __future__ import annotations

import pytest

from tests.budget import first
from tests.simulation.attack import attack

BLOCK = 50


@pytest.mark.parametrize("first", first(3, range(0, 500, BLOCK)))
def test_nothing_is_wrong(first: int) -> None:
    for seed in range(first, first + BLOCK):
        failure = attack(seed)
        assert failure is None, f"seed {seed}\n{failure}"


@pytest.mark.parametrize("seed", [903_407, 1_000_929, 2_000_712])
def test_what_once_was_wrong(seed: int) -> None:
    """Worlds that found what a thousand others didn't: a load that gave way within a step, a copy into a page that was
    given back, a guaranteed sequence that was preempted before a held prefix."""
    failure = attack(seed)
    assert failure is None, f"{failure}"
