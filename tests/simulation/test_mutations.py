"""The simulation is worth what it finds: every planted bug must show within a few worlds."""

from __future__ import annotations

import pytest

from tests.simulation.attack import attack, play
from tests.simulation.mutations import MUTATIONS
from tests.simulation.spec import draw_world

ENOUGH = 200
"""Worlds within which a planted bug must show."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    assert any(play(draw_world(seed)) is not None for seed in range(ENOUGH)), f"{name} was not noticed"


def test_a_failing_world_is_made_small_and_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS["ignore_the_namespace"](monkeypatch)
    failure = next(failure for seed in range(ENOUGH) if (failure := attack(seed)) is not None)
    assert len(failure.requests) <= 3
    assert f"python -m tests.simulation --seed {failure.spec.seed} --only" in str(failure)
    assert play(failure.spec) is not None
    monkeypatch.undo()
    assert play(failure.spec) is None
