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
