"""The simulation is worth what it finds: every planted bug must show within a few worlds."""

from __future__ import annotations

import pytest

from tests.simulation.attack import attack, play
from tests.simulation.mutations import MUTATIONS
from tests.simulation.spec import draw_world

ENOUGH = 200
"""Worlds within which a planted bug must show."""

SHOWN_BY = {
    "skip_the_checksum": 626,
    "forget_the_page_before": 36,
    "free_a_page_that_is_filled": 73,
    "publish_what_has_not_arrived": 46,
    "keep_the_pages_of_a_failed_load": 61,
    "queue_the_page_itself": 46,
    "forget_who_waits_for_a_load": 36,
    "find_what_was_reset_in_a_tier": 210,
    "fill_pages_after_the_deadline": 101,
    "take_a_failed_load_for_whole": 85,
    "wait_for_a_tier_without_end": 75,
    "append_what_was_cut_off": 80,
    "keep_what_was_reset": 74,
    "preempt_without_end": 120,
    "turn_copies_round": 29,
}
"""Where to look first for the rarer ones, to save time; worlds change, so this is no more than a hint."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    seeds = (SHOWN_BY.get(name, 0), *range(ENOUGH))
    assert any(play(draw_world(seed)) is not None for seed in seeds), f"{name} was not noticed"


def test_a_failing_world_is_made_small_and_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS["ignore_the_namespace"](monkeypatch)
    failure = next(failure for seed in range(ENOUGH) if (failure := attack(seed)) is not None)
    assert len(failure.requests) <= 3
    assert f"python -m tests.simulation --seed {failure.spec.seed} --only" in str(failure)
    assert play(failure.spec) is not None
    monkeypatch.undo()
    assert play(failure.spec) is None
