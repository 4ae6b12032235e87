"""The waste that the README promises."""

from __future__ import annotations

from bench.waste import lengths, measure


def test_paged_waste_is_under_four_percent_and_contiguous_over_sixty() -> None:
    requests = lengths()
    assert len(requests) == 64
    assert sum(prompt + output for prompt, output in requests) / len(requests) > 400
    results = measure()
    assert results["paged"].unused < 0.04
    assert results["contiguous"].unused >= 0.6
    assert results["paged"].peak_running > 2 * results["contiguous"].peak_running
