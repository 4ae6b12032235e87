"""What the timeline remembers of requests."""

from __future__ import annotations

from collections import Counter

import pytest

from pagetrie.engine.live import LiveView
from pagetrie.engine.observer import Observers
from pagetrie.engine.timeline import Timeline, percentiles
from pagetrie.kv.picture import ACTIVE, LOADING
from tests.engine.test_tiers import PROMPT, stored
from tests.engine.tiers import ToldTier
from tests.engine.toy import World


def phases(timeline: Timeline, request_id: str) -> list[str]:
    track = next((t for t in timeline.ended if t.request_id == request_id), None) or timeline.running[request_id]
    times = [time for _, time in track.phases]
    assert times == sorted(times)
    return [phase for phase, _ in track.phases]


def test_a_request_from_its_arrival_to_its_end() -> None:
    timeline = Timeline()
    world = World(observer=Observers([timeline]))
    world.add("r", [1, 2, 3, 4, 5, 6], max_tokens=3, ignore_eos=True)
    world.step()
    assert phases(timeline, "r") == ["queued", "prefill", "decode"]
    world.run()
    assert phases(timeline, "r") == ["queued", "prefill", "decode", "done"]
    (track,) = timeline.ended
    assert (track.prompt_tokens, track.generated_tokens, track.reason) == (6, 3, "length")
    assert timeline.totals.generated_tokens == 3 and timeline.totals.prefill_tokens == 6
    assert timeline.totals.misses == {"never_stored": 1}
    assert len(timeline.first_tokens) == len(timeline.token_times) == len(timeline.admissions) == 1


def test_preempted_resumed_and_cancelled_requests() -> None:
    timeline = Timeline()
    world = World(num_pages=8, page_size=4, max_model_len=32, seats=4, observer=timeline)
    for name in "abcd":
        world.add(name, [ord(name)] * 6, max_tokens=20, ignore_eos=True)
    while not any(track.lost for track in timeline.running.values()):
        world.step()
    lost = next(name for name, track in timeline.running.items() if track.lost)
    assert phases(timeline, lost)[-1] == "preempted"
    world.add("never", [200] * 8, max_tokens=1)
    world.abort("never")
    assert phases(timeline, "never") == ["queued", "done"]
    gone = next(name for name, track in timeline.running.items() if not track.lost)
    world.abort(gone)
    assert phases(timeline, gone)[-1] == "done"
    world.run()
    assert phases(timeline, lost)[-4:] in (
        ["preempted", "prefill", "decode", "done"],
        ["prefill", "preempted", "prefill", "done"],
    )
    assert not timeline.running and timeline.totals.preemptions > 0


def test_a_snapshot_shows_running_waiting_and_ended_requests() -> None:
    timeline = Timeline()
    world = World(seats=2, observer=timeline, clock=lambda: 50.0)
    world.add("over", [9, 9, 9], max_tokens=1)
    world.run()
    for name in range(70):
        world.add(str(name), [name, 2, 3, 4, 5], max_tokens=5, ignore_eos=True)
    world.step()
    snapshot = LiveView(timeline).take(world.engine)
    shown = {request.id: request for request in snapshot.requests}
    assert len(shown) == 2 + 64 + 1 and snapshot.more_waiting == 4
    assert (snapshot.running, snapshot.waiting) == (2, 68)
    assert shown["over"].reason == "length" and shown["0"].phases[-1][0] == "decode" and shown["1"].pages == 2
    assert shown["2"].phases == [("queued", 0.0)] and shown["0"].generated_tokens == 1
    assert snapshot.prompt_tokens == 3 + 5 + 5 and snapshot.cached_by_tier == {"pool": 0}
    assert sum(snapshot.stats.__getattribute__(f"{state}_pages") for state in ("free", "active", "cached")) == 64


def test_a_snapshot_shows_pages_on_their_way_and_where_cached_tokens_came_from() -> None:
    timeline = Timeline()
    world = stored(ToldTier(), observer=timeline)
    view = LiveView(timeline)
    world.add("again", PROMPT, max_tokens=3)
    world.step()
    snapshot = view.take(world.engine)
    counts = Counter(snapshot.picture.states)
    assert counts[LOADING] == snapshot.stats.loading_pages == 10 and counts[ACTIVE] == 0
    assert [request.phases[-1][0] for request in snapshot.requests if not request.reason] == ["queued"]
    world.work()
    world.finish()
    snapshot = view.take(world.engine)
    assert LOADING not in snapshot.picture.states
    assert snapshot.cached_by_tier == {"pool": 0, "disk": 40} and snapshot.prompt_tokens == 2 * len(PROMPT)


@pytest.mark.parametrize(
    ("samples", "expected"), [([], []), ([3.0], [3.0] * 3), (list(range(100, 0, -1)), [51, 91, 100])]
)
def test_percentiles(samples: list[float], expected: list[float]) -> None:
    assert percentiles(samples) == expected
