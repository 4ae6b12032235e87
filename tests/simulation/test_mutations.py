"""The simulation is worth what it finds: every planted bug must show within a few worlds."""

from __future__ import annotations

from functools import cache

import pytest

from tests.simulation.attack import attack, play
from tests.simulation.mutations import MUTATIONS
from tests.simulation.spec import draw_world

ENOUGH = 600
"""Worlds within which a planted bug must show."""

SHOWN_BY = {
    "skip_a_release": (985,),
    "share_without_reference": (1182,),
    "write_without_copying": (1182,),
    "commit_twice": (174,),
    "publish_an_unfinished_page": (985,),
    "publish_a_doubtful_tail": (88,),
    "forget_copies": (1120,),
    "turn_copies_round": (471, 327, 402),
    "start_a_token_late_after_a_hit": (1120,),
    "evict_a_pinned_page": (1120,),
    "evict_the_front_of_a_leaf": (1139, 212, 629),
    "ignore_the_namespace": (834,),
    "hit_the_whole_prompt": (1182,),
    "keep_what_was_reset": (308, 331, 594),
    "admit_without_pages": (1154,),
    "drop_a_victim": (1120,),
    "deliver_twice_after_preemption": (1154,),
    "leak_a_seat_on_cancel": (1004,),
    "exceed_the_seats": (1182,),
    "lose_a_stop_hold_back": (1182,),
    "hold_back_for_good": (985,),
    "lose_a_token": (1004,),
    "one_seed_for_all_choices": (1182,),
    "forget_the_queue_cap": (524,),
    "preempt_without_end": (706, 343, 46),
    "preempt_the_most_important": (455,),
    "pass_without_end": (352, 16, 45),
    "forget_the_time_of_passing": (456, 16, 139),
    "never_age": (363, 16, 45),
    "start_newcomers_before_victims": (895,),
    "leave_a_victim_in_the_step": (455,),
    "never_wake_who_waits_for_a_page": (699,),
    "never_time_out": (1172,),
    "time_out_early": (1187,),
    "keep_the_hold_of_a_deleted_context": (1120,),
    "append_what_was_cut_off": (425, 80, 96),
    "hold_without_a_pin": (1120,),
    "keep_the_pages_of_dropped_beams": (484,),
    "continue_the_wrong_beams": (204,),
    "fold_beams_too_far": (570, 929, 47),
    "skip_the_checksum": (196, 409, 755),
    "forget_the_page_before": (304,),
    "free_a_page_that_is_filled": (765, 694, 1039),
    "fill_pages_after_the_deadline": (520, 181, 266),
    "publish_what_has_not_arrived": (927, 694, 765),
    "take_a_failed_load_for_whole": (322, 132, 589),
    "keep_the_pages_of_a_failed_load": (927, 132, 589),
    "queue_the_page_itself": (922, 772, 644),
    "wait_for_a_tier_without_end": (304,),
    "find_what_was_reset_in_a_tier": (226, 697, 217),
    "forget_who_waits_for_a_load": (927, 694, 772),
}
"""Small worlds to look at first, to save time; worlds change, so this is no more than a hint."""


@cache
def smallest_first() -> list[int]:
    """The numbers of the worlds to search."""
    return sorted(range(ENOUGH), key=lambda seed: len(draw_world(seed).requests))


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    for find in (lambda: SHOWN_BY.get(name, ()), smallest_first):
        if any(play(draw_world(seed)) is not None for seed in find()):
            return
    pytest.fail(f"{name} was not noticed")


def test_nothing_else_is_wrong_in_those_worlds() -> None:
    for seed in sorted({seed for seeds in SHOWN_BY.values() for seed in seeds}):
        error = play(draw_world(seed))
        assert error is None, f"seed {seed}: {error}"


def test_a_failing_world_is_made_small_and_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS["ignore_the_namespace"](monkeypatch)
    failure = next(failure for seed in smallest_first() if (failure := attack(seed)) is not None)
    assert len(failure.requests) <= 3
    assert f"python -m tests.simulation --seed {failure.spec.seed} --only" in str(failure)
    assert play(failure.spec) is not None
    monkeypatch.undo()
    assert play(failure.spec) is None
