"""Why a prompt missed, in situations that need a step in hand."""

from __future__ import annotations

import pytest

from pagetrie.engine.cache_records import CacheRecord, CacheRecords
from pagetrie.engine.observer import AdmissionReport, EngineObserver
from pagetrie.engine.tenant import Owner
from pagetrie.errors import InvalidRequestError
from tests.engine.toy import World


def record(world: World, request_id: str, salt: str = "") -> CacheRecord:
    return world.engine.cache_records.get(Owner(salt=salt), request_id)


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_a_page_that_a_running_request_still_fills(index: str) -> None:
    world = World(index=index, page_size=16)
    prompt = list(range(1, 25))
    world.add("first", prompt, max_tokens=30, ignore_eos=True)
    world.step()
    world.step()
    world.add("second", [*prompt, 99, 98], max_tokens=1)
    world.step()
    found = record(world, "second")
    assert (found.reason, found.cached_tokens) == ("computing", 16)
    assert (found.computing, found.computed_by) == (8, "first")
    world.run()


def test_a_page_of_a_victim_that_made_way_in_the_same_step() -> None:
    world = World(page_size=4, seats=2, budget=64)
    prompt = list(range(1, 12))
    world.add("other", list(range(30, 50)), max_tokens=30, ignore_eos=True, priority=-5)
    world.add("victim", prompt, max_tokens=30, ignore_eos=True, priority=5)
    world.step()
    world.add("urgent", prompt, max_tokens=1, priority=-3)
    world.step()
    found = record(world, "urgent")
    assert (found.reason, found.cached_tokens, found.matched) == ("computing", 8, 8)
    assert (found.computing, found.computed_by) == (2, "")
    world.run()


def test_who_computes_for_another_salt_or_for_itself_alone_is_no_reason() -> None:
    world = World(page_size=16)
    prompt = list(range(1, 12))
    world.add("salted", prompt, salt="s", max_tokens=30, ignore_eos=True)
    world.add("alone", prompt, max_tokens=30, ignore_eos=True, use_prefix_cache=False)
    world.step()
    world.add("second", prompt, max_tokens=1)
    world.step()
    assert record(world, "second").reason == "never_stored"
    world.run()


def test_the_report_says_the_same_and_the_oldest_records_go() -> None:
    heard: list[AdmissionReport] = []

    class Listener(EngineObserver):
        def on_admission(self, report: AdmissionReport) -> None:
            heard.append(report)

    world = World(observer=Listener(), num_pages=16)
    world.engine.cache_records = CacheRecords(
        world.cache, namespace=world.engine.namespace, clock=lambda: 0.0, capacity=2
    )
    for number in range(4):
        world.add(str(number), [1, 2, 3, 4, 5, 6, 7, number, 9], max_tokens=1)
        world.run()
    assert [report.reason for report in heard] == ["never_stored", "differs", "differs", "differs"]
    assert [record(world, name).cached_tokens for name in "23"] == [7, 7]
    for name in ("0", "1", "9"):
        with pytest.raises(InvalidRequestError, match="remembered"):
            record(world, name)
    with pytest.raises(InvalidRequestError, match="remembered"):
        record(world, "3", salt="another")


def test_a_preempted_request_keeps_its_first_diagnosis() -> None:
    world = World(num_pages=8, page_size=4, max_model_len=32, seats=4)
    for name in "abcd":
        world.add(name, [ord(name)] * 6, max_tokens=20, ignore_eos=True)
    world.run()
    assert all(record(world, name).reason == "never_stored" for name in "abcd")
