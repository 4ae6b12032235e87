"""Hit rates on the published traces, against figures that others have measured."""

from __future__ import annotations

import pytest

from pagetrie.replay.index_only import replay_index
from pagetrie.replay.reference import belady_hits, flat_lru_hits
from tests.budget import first
from tests.replay.traces import published

FRONT = {
    "conversation": {
        1000: 0.0445, 3000: 0.0650, 5859: 0.1355, 10000: 0.2112, 30000: 0.3257, 50000: 0.3546, 97656: 0.3635,
        100000: 0.3637,
    },
    "synthetic": {1000: 0.0825, 3000: 0.1878, 5859: 0.3094, 10000: 0.4235, 30000: 0.6242, 50000: 0.6396},
}  # fmt: skip
"""Block LRU touched from the front."""
BACK = {"conversation": {5859: 0.1361, 30000: 0.3257}, "synthetic": {1000: 0.0841, 10000: 0.4239, 30000: 0.6242}}
"""Touched from the back, as the tree does it."""
THIRD_PARTY = {
    "conversation": (0.366, {1: 0.052, 5: 0.195, 10: 0.278, 25: 0.353, 50: 0.363}),
    "synthetic": (0.640, {1: 0.034, 5: 0.155, 10: 0.260, 25: 0.443, 50: 0.589}),
}
"""No eviction; LRU at a percentage of the distinct pages."""
TARGETS = {"conversation": {5000: 0.25, 10000: 0.18}, "synthetic": {5000: 0.15, 10000: 0.30}}
"""What the adaptive policy closes of the gap between LRU and Belady's optimum, over the whole trace."""

NAMES = ("conversation", "synthetic")


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name: str) -> None:
    trace = published(name)
    distinct = len({page for request in trace.requests for page in request.pages})
    sizes = {"conversation": (12_031, 288_500, 182_790), "synthetic": (3_993, 121_877, 43_924)}
    assert (len(trace.requests), trace.pages, distinct) == sizes[name]


@pytest.mark.parametrize("name", first(1, ["synthetic", "conversation"]))
def test_a_plain_store_of_pages_gives_the_known_rates(name: str) -> None:
    trace = published(name)
    for capacity, rate in FRONT[name].items():
        assert flat_lru_hits(trace, capacity) / trace.pages == pytest.approx(rate, abs=1e-4)


@pytest.mark.parametrize("name", first(1, ["synthetic", "conversation"]))
def test_the_tree_gives_the_rates_of_a_store_touched_from_the_back(name: str) -> None:
    trace = published(name)
    for capacity, rate in BACK[name].items():
        assert replay_index(trace, capacity)[0].rate == pytest.approx(rate, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", ["radix", "hash"])
def test_both_indexes_agree_with_the_plain_store_at_all_capacities(index: str, name: str) -> None:
    trace = published(name)
    for capacity in FRONT[name]:
        rate = replay_index(trace, capacity, index=index)[0].rate
        assert rate == pytest.approx(flat_lru_hits(trace, capacity, touch="back") / trace.pages, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_third_partys_table(name: str) -> None:
    trace = published(name)
    distinct = len({page for request in trace.requests for page in request.pages})
    ideal, rates = THIRD_PARTY[name]
    assert replay_index(trace, distinct)[0].rate == pytest.approx(ideal, abs=1e-3)
    for percent, rate in rates.items():
        assert replay_index(trace, distinct * percent // 100)[0].rate == pytest.approx(rate, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_adaptive_policy_closes_its_share_of_the_gap(name: str) -> None:
    trace = published(name)
    for capacity, share in TARGETS[name].items():
        lru, best = replay_index(trace, capacity)[0].hits, belady_hits(trace, capacity)
        assert replay_index(trace, capacity, "adaptive")[0].hits >= lru + share * (best - lru)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_adaptive_policy_is_nowhere_much_worse_than_lru(name: str) -> None:
    trace = published(name)
    for capacity in FRONT[name]:
        assert replay_index(trace, capacity, "adaptive")[0].rate >= replay_index(trace, capacity)[0].rate - 0.005
