"""What is expected of loading and computing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagetrie.kv.estimates import PrefillSpeed, TierSpeed
from pagetrie.kv.tiers.interface import Speed
from pagetrie.kv.tiers.load import Sample
from pagetrie.models.loading import load_checkpoint

PER_TOKEN, PER_ATTENDED = 1e-3, 4e-7


def took(start: int, tokens: int) -> float:
    """A machine."""
    return sum(PER_TOKEN + PER_ATTENDED * position for position in range(start, start + tokens))


@pytest.mark.parametrize("seen_at", [0, 6000])
def test_what_was_computed_here_tells_what_it_takes_elsewhere(seen_at: int) -> None:
    speed = PrefillSpeed(PER_ATTENDED / PER_TOKEN)
    speed.note(500, 500 * seen_at + 500 * 250, took(seen_at, 500))
    for start, tokens in ((0, 100), (0, 8000), (7000, 1000)):
        assert speed.seconds(start, tokens) == pytest.approx(took(start, tokens), rel=0.01)


def test_the_models_attention_weighs_as_much_as_all_else_after_some_thousand_tokens(bundled_model: Path) -> None:
    share = load_checkpoint(bundled_model).config.attention_share()
    assert share == pytest.approx(2 * 9 * 64 / (576 * (2 * 12 * 64 + 3 * 1536)))
    assert 2000 < 1 / share < 4000


def test_a_tier_is_measured_without_rests_and_expected_with_them() -> None:
    speed = TierSpeed(Speed(0.0, 1e9, 1e-9))
    speed.take_sample(Sample("disk", 1000, seconds=2.0, computed=0.5), now=0.0)
    assert speed.seconds(1000, 1.0, rest=0) == pytest.approx(2.0)
    assert speed.seconds(1000, 1.0, rest=10) == pytest.approx(2.0 + 0.5 * 10)


def test_a_measured_speed_is_forgotten_after_a_while() -> None:
    speed = TierSpeed(Speed(1.0, 100.0))
    speed.take(100, 9.0, now=0.0)
    assert speed.seconds(100, 1.0, rest=0) == pytest.approx(10.0)
    assert speed.seconds(100, 100.0, rest=0) == pytest.approx(2.0)
