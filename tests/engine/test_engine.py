"""The engine over a toy model whose text changes if any page is wrong."""

from __future__ import annotations

import random

import pytest

from pagetrie.engine.observer import AdmissionReport, EngineObserver, FinishReport, StepReport, TokenReport
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.engine.runner import SampleSpec
from pagetrie.errors import ConfigError, EngineError, InvalidRequestError, QueueFullError
from tests.budget import first
from tests.engine.toy import EOS, ToyVocabulary, World, expected


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 200) for _ in range(length)]


def test_text_is_that_of_a_plain_run() -> None:
    world = World()
    world.add("a", prompt(1, 30), max_tokens=20)
    world.run()
    assert world.seen["a"].tokens[0] == expected(prompt(1, 30), 20)
    assert world.idle_pages() == 0


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_a_second_user_computes_only_what_is_new(index: str) -> None:
    world = World(index=index)
    shared = prompt(1, 40)
    world.add("a", [*shared, 7, 8, 9], max_tokens=4)
    world.run()
    before = world.runner.computed_tokens
    world.add("b", [*shared, 9, 9, 9], max_tokens=1)
    world.run()
    assert world.seen["b"].last is not None
    assert world.seen["b"].last.cached_tokens == 40
    assert world.runner.computed_tokens - before == 3
    assert world.seen["b"].tokens[0] == expected([*shared, 9, 9, 9], 1)


def test_without_an_index_nothing_is_shared() -> None:
    world = World(index="none")
    for name in "ab":
        world.add(name, prompt(1, 40), max_tokens=4)
        world.run()
        assert world.seen[name].last is not None
        assert world.seen[name].last.cached_tokens == 0
    assert world.cache.stats().cached_pages == 0


def test_salts_separate_and_equal_salts_share() -> None:
    world = World()
    hits = {}
    for name, salt in [("a", "x"), ("b", "y"), ("c", ""), ("d", "x")]:
        world.add(name, prompt(1, 40), salt=salt, max_tokens=2)
        world.run()
        last = world.seen[name].last
        assert last is not None
        hits[name] = last.cached_tokens
    assert hits == {"a": 0, "b": 0, "c": 0, "d": 39}


def test_a_whole_prompt_in_the_cache_still_computes_one_token() -> None:
    world = World(page_size=16, max_model_len=200)
    for name in "abc":
        world.add(name, prompt(3, 32), max_tokens=3)
        world.run()
    for name in "bc":
        last = world.seen[name].last
        assert last is not None and last.cached_tokens == 31
        assert world.seen[name].tokens == world.seen["a"].tokens


def test_next_turn_hits_all_of_the_turn_before() -> None:
    """I6."""
    world = World(page_size=16)
    first = prompt(4, 37)
    world.add("turn 1", first, max_tokens=10, ignore_eos=True)
    world.run()
    reply = world.seen["turn 1"].tokens[0]
    world.add("turn 2", [*first, *reply, 5, 6, 7], max_tokens=1)
    world.run()
    last = world.seen["turn 2"].last
    assert last is not None
    # The last reply token was handed out but never computed.
    assert last.cached_tokens == 37 + 10 - 1


def test_burst_on_a_cold_trunk_computes_it_once() -> None:
    """I4: four requests at once on one trunk of 400 tokens with tails of 20: it is computed once and held once."""
    world = World(num_pages=64, page_size=16, max_model_len=600, budget=64)
    trunk = prompt(5, 400)
    for name in range(4):
        world.add(str(name), trunk + prompt(50 + name, 20), max_tokens=3, ignore_eos=True)
    peak = 0
    while world.engine.has_work:
        world.step()
        peak = max(peak, world.idle_pages())
    decoded = 4 * 2
    assert world.runner.computed_tokens - decoded <= 400 + 4 * 20 + 4 * 16
    assert peak <= 400 // 16 + 4 * 3
    for name in range(4):
        assert world.seen[str(name)].tokens[0] == expected(trunk + prompt(50 + name, 20), 3, eos=False)


def test_when_the_leader_leaves_a_follower_takes_over() -> None:
    """I4."""
    world = World(num_pages=64, page_size=16, max_model_len=600, budget=64)
    trunk = prompt(5, 400)
    for name in range(4):
        world.add(str(name), trunk + prompt(50 + name, 20), max_tokens=3, ignore_eos=True)
    for _ in range(3):
        world.step()
    assert world.engine.num_running == 1
    world.abort("0")
    world.run()
    for name in range(1, 4):
        assert world.seen[str(name)].tokens[0] == expected(trunk + prompt(50 + name, 20), 3, eos=False)
    assert world.runner.computed_tokens <= 400 + 4 * 20 + 4 * 16 + 4 * 3 + 16


def test_a_hit_given_up_for_room_stays_within_the_budget() -> None:
    """The whole pool is needed, so the page of a partial hit is too: its tokens are computed anew, in this budget."""
    world = World(num_pages=4, page_size=4, max_model_len=16, seats=3, budget=3)
    world.add("first", prompt(1, 11), max_tokens=1)
    world.run()
    world.add("second", [*prompt(1, 10), 7, 8, 9], max_tokens=3, ignore_eos=True)
    world.run()
    assert max(sum(len(share.token_ids) for share in step.sequences) for step in world.runner.steps) == 3
    assert world.seen["second"].tokens[0] == expected([*prompt(1, 10), 7, 8, 9], 3, eos=False)


def test_long_prompts_never_stall_others_tokens() -> None:
    world = World(num_pages=200, budget=16, max_model_len=500)
    world.add("short", prompt(1, 4), max_tokens=30, ignore_eos=True)
    world.step()
    world.add("long", prompt(2, 300), max_tokens=2)
    for done in range(1, 15):
        world.step()
        assert len(world.seen["short"].tokens[0]) == done + 1
    world.run()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_preempted_text_equals_the_big_pool_text(temperature: float) -> None:
    """A pool so small that every request is preempted again and again (pain C5)."""
    texts = []
    for num_pages in (12, 400):
        world = World(num_pages=num_pages, page_size=4, max_model_len=48)
        for name in range(8):
            world.add(str(name), prompt(name, 10), max_tokens=30, ignore_eos=True, temperature=temperature, seed=name)
        preemptions = 0
        while world.engine.has_work:
            waiting = {sequence for sequence in world.engine._scheduler.waiting if sequence.started}
            world.step()
            preemptions += len({s for s in world.engine._scheduler.waiting if s.started} - waiting)
        texts.append([world.seen[str(name)].tokens[0] for name in range(8)])
        if num_pages == 12:
            assert preemptions >= 10
        for name in range(8):
            last = world.seen[str(name)].last
            assert last is not None and last.cached_tokens < 4 and last.completion_tokens == 30
    assert texts[0] == texts[1]
    assert texts[0] == [
        expected(prompt(name, 10), 30, seed=name, temperature=temperature, eos=False) for name in range(8)
    ]


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    world = World(num_pages=14, page_size=4, max_model_len=48)
    shared = prompt(1, 16)
    world.add("seed", shared, max_tokens=1)
    world.run()
    for name in range(4):
        world.add(str(name), [*shared, name + 1], max_tokens=25, ignore_eos=True)
    world.run()
    for name in range(4):
        last = world.seen[str(name)].last
        assert last is not None and last.cached_tokens == 16


def test_pages_short_by_one_each_preempts_until_pages_suffice() -> None:
    """15 sequences that each cross a page edge with 5 pages free (pain C8)."""
    world = World(num_pages=20, page_size=16, max_model_len=100, seats=16, budget=300)
    for name in range(15):
        world.add(str(name), prompt(name, 16), max_tokens=20, ignore_eos=True)
    world.step()
    assert world.engine.num_running > 0
    world.run()
    for name in range(15):
        assert world.seen[str(name)].tokens[0] == expected(prompt(name, 16), 20, eos=False)


def test_an_older_prompt_takes_pages_from_a_younger_sequence_already_in_the_step() -> None:
    """Scheduled, then preempted in one step: tables and budget stay consistent (pain C6)."""
    world = World(num_pages=12, page_size=4, max_model_len=48, budget=8)
    world.add("old", prompt(1, 40), max_tokens=4, ignore_eos=True)
    world.step()
    world.add("young", prompt(2, 3), max_tokens=20, ignore_eos=True)
    while world.engine.num_running < 2:
        world.step()
    while world.engine.num_running == 2:
        world.step()
    assert [sequence.started for sequence in world.engine._scheduler.waiting] == [True]
    world.run()
    assert world.seen["old"].tokens[0] == expected(prompt(1, 40), 4, eos=False)
    assert world.seen["young"].tokens[0] == expected(prompt(2, 3), 20, eos=False)


def test_nothing_new_starts_while_a_victim_waits() -> None:
    """Pain C10: 20 requests on 16 pages, each preempted a bounded number of times."""
    world = World(num_pages=16, page_size=4, max_model_len=40, seats=20, budget=64)
    for name in range(20):
        world.add(str(name), prompt(name, 12), max_tokens=16, ignore_eos=True)
    preemptions: dict[int, int] = {}
    while world.engine.has_work:
        victims = {s.order for s in world.engine._scheduler.waiting if s.started}
        before = {s.order for s in world.engine._scheduler.running}
        world.step()
        after = {s.order for s in world.engine._scheduler.running}
        for order in {s.order for s in world.engine._scheduler.waiting if s.started} - victims:
            preemptions[order[0]] = preemptions.get(order[0], 0) + 1
        if victims - after:
            started = after - before - victims
            assert not started, "a new request started while a victim waited"
    assert preemptions
    assert max(preemptions.values()) <= 3
    for name in range(20):
        assert world.seen[str(name)].tokens[0] == expected(prompt(name, 12), 16, eos=False)


def test_n_choices_share_the_prompts_pages() -> None:
    world = World(num_pages=64, page_size=16)
    world.add("a", prompt(1, 40), n=4, max_tokens=6, temperature=1.0, seed=11, ignore_eos=True)
    peak = 0
    while world.engine.has_work:
        world.step()
        peak = max(peak, world.idle_pages())
    for index in range(4):
        want = expected(prompt(1, 40), 6, seed=11 + index, temperature=1.0, eos=False)
        assert world.seen["a"].tokens[index] == want
    # Two full pages once, the half-filled third page four times.
    assert peak <= 2 + 4
    assert world.runner.computed_tokens == 40 + 4 * 5
    last = world.seen["a"].last
    assert last is not None and last.completion_tokens == 24 and last.prompt_tokens == 40


@pytest.mark.parametrize("room", [10, 12, 16])
def test_forks_in_a_full_pool_come_out_right(room: int) -> None:
    """n=8 with room for a few forks: all come out right, nothing leaks (pain B5)."""
    world = World(num_pages=room, page_size=4, max_model_len=36, seats=8)
    world.add("a", prompt(1, 14), n=8, max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    world.run()
    for index in range(8):
        want = expected(prompt(1, 14), 12, seed=5 + index, temperature=1.0, eos=False)
        assert world.seen["a"].tokens[index] == want
    assert world.idle_pages() == 0


def test_what_can_never_fit_is_refused_and_others_go_on() -> None:
    """Pool of 512 tokens under a larger context limit (pain C1)."""
    world = World(num_pages=32, page_size=16, max_model_len=4096)
    with pytest.raises(InvalidRequestError) as refused:
        world.add("big", prompt(1, 600), max_tokens=5)
    assert refused.value.code == "context_length_exceeded"
    assert "512" in refused.value.message
    assert "600" in refused.value.message
    world.add("grows", prompt(2, 500), max_tokens=100, ignore_eos=True)
    world.add("small", prompt(3, 20), max_tokens=5)
    world.run()
    assert world.seen["grows"].reasons[0] == "length"
    assert len(world.seen["grows"].tokens[0]) == 12
    assert world.seen["small"].tokens[0] == expected(prompt(3, 20), 5)


def test_context_limit() -> None:
    world = World(max_model_len=64)
    for length in (64, 65):
        with pytest.raises(InvalidRequestError) as refused:
            world.add("x", prompt(1, length), max_tokens=5)
        assert refused.value.code == "context_length_exceeded"
        assert "64" in refused.value.message
    world.add("edge", prompt(1, 63), max_tokens=50)
    world.run()
    assert len(world.seen["edge"].tokens[0]) == 1
    assert world.seen["edge"].reasons[0] == "length"


def test_a_lone_request_that_fills_the_pool_ends_with_its_text() -> None:
    """Pain C2: never an empty answer, and the server serves the next."""
    world = World(num_pages=4, page_size=4, max_model_len=100)
    world.add("a", prompt(1, 10), max_tokens=None, ignore_eos=True)
    world.add("b", prompt(2, 5), max_tokens=3)
    world.run()
    assert world.seen["a"].tokens[0] == expected(prompt(1, 10), 6, eos=False)
    assert world.seen["a"].reasons[0] == "length"
    assert world.seen["b"].tokens[0] == expected(prompt(2, 5), 3)


@pytest.mark.parametrize("phase", range(8))
def test_cancel_in_every_phase_gives_pages_back_before_the_next_step(phase: int) -> None:
    world = World(num_pages=32, page_size=4, budget=8)
    world.add("other", prompt(9, 6), max_tokens=40, ignore_eos=True)
    world.add("a", prompt(1, 30), n=3, max_tokens=20, ignore_eos=True, temperature=1.0, seed=1)
    for _ in range(phase):
        world.step()
    others = len(world.engine._scheduler.running[0].lease.pages) if world.engine.num_running else 0  # type: ignore[union-attr]
    world.abort("a")
    assert world.idle_pages() == others
    world.run()
    assert world.seen["other"].tokens[0] == expected(prompt(9, 6), 40, eos=False)
    assert world.idle_pages() == 0


def test_a_hundred_cancelled_streams_leave_nothing_behind() -> None:
    """Pain B1."""
    world = World(num_pages=64, page_size=4)
    for turn in range(100):
        world.add(str(turn), prompt(turn, 9), n=4, max_tokens=150, temperature=1.0, ignore_eos=True)
        world.step()
        world.step()
        world.abort(str(turn))
        assert world.idle_pages() == 0
        assert not world.engine.has_work
        assert not world.engine._states


def test_queued_requests_of_clients_that_left_never_run() -> None:
    """Pain B7."""
    world = World(seats=1, budget=64)
    world.add("busy", prompt(1, 8), max_tokens=10, ignore_eos=True)
    world.step()
    for name in range(5):
        world.add(str(name), prompt(10 + name, 8), max_tokens=5)
    for name in range(5):
        world.abort(str(name))
    before = world.runner.computed_tokens
    world.run()
    assert world.runner.computed_tokens - before == 9


def test_stop_token_and_end_of_sequence() -> None:
    tokens = iter([5, 6, 7, EOS, 5, 6, 7, EOS, 5, EOS, 6, 7])

    def scripted(context: list[int], spec: SampleSpec) -> int:
        return next(tokens)

    world = World(next_token=scripted)  # type: ignore[arg-type]
    world.add("eos", prompt(1, 3), max_tokens=10)
    world.run()
    assert (world.seen["eos"].tokens[0], world.seen["eos"].reasons[0]) == ([5, 6, 7], "stop")
    assert world.seen["eos"].stop_reasons[0] is None
    world.add("stop", prompt(2, 3), max_tokens=10, stop_token_ids=[7])
    world.run()
    assert (world.seen["stop"].tokens[0], world.seen["stop"].stop_reasons[0]) == ([5, 6], 7)
    world.add("ignore", prompt(3, 3), max_tokens=4, ignore_eos=True)
    world.run()
    assert world.seen["ignore"].tokens[0] == [EOS, 5, EOS, 6]
    assert world.seen["ignore"].text[0] == "fg"


def test_min_tokens_bans_the_end() -> None:
    def ends_if_it_may(context: list[int], spec: SampleSpec) -> int:
        return EOS if EOS not in spec.banned_ids else 3

    world = World(next_token=ends_if_it_may)  # type: ignore[arg-type]
    world.add("a", prompt(1, 3), max_tokens=10, min_tokens=4)
    world.run()
    assert world.seen["a"].tokens[0] == [3, 3, 3, 3]


def test_stop_strings_across_tokens_and_preemption() -> None:
    pieces = {1: b"own", 2: b" f", 3: b"ox", 4: b"br", 5: b"?"}
    script = [4, 1, 2, 5, 4, 1, 2, 3, 5, 5, 5, 5, 5, 5, 5]

    def scripted(context: list[int], spec: SampleSpec) -> int:
        return script[len(spec.output_ids)]

    for num_pages in (6, 100):
        world = World(vocabulary=ToyVocabulary(pieces), next_token=scripted, num_pages=num_pages, max_model_len=24)  # type: ignore[arg-type]
        for name in range(3):
            world.add(str(name), prompt(name, 6), max_tokens=12, stop=["own fox"])
        world.run()
        for name in range(3):
            seen = world.seen[str(name)]
            assert seen.text[0] == "brown f?br"
            assert seen.stop_reasons[0] == "own fox"
            assert seen.reasons[0] == "stop"
            assert "".join(seen.pieces[0]) == seen.text[0]


def test_max_tokens_zero_fills_the_cache_only() -> None:
    world = World()
    world.add("warm", prompt(1, 40), max_tokens=0)
    world.run()
    assert world.seen["warm"].reasons[0] == "length"
    assert world.seen["warm"].tokens[0] == []
    world.add("a", prompt(1, 40), max_tokens=3)
    world.run()
    assert world.seen["a"].last is not None
    assert world.seen["a"].last.cached_tokens == 39


def test_prompt_logprobs_do_not_depend_on_the_cache() -> None:
    """Pain A10: cold, warm and after other prompts, one entry per prompt token."""
    lists = []
    world = World(num_pages=40, budget=8)
    for name in ("cold", "warm", "between", "again"):
        tokens = prompt(77 if name == "between" else 1, 21)
        world.add(name, tokens, max_tokens=0 if name == "warm" else 2, prompt_logprobs=0)
        world.run()
        entries = world.seen[name].prompt_logprobs
        assert isinstance(entries, list)
        assert len(entries) == 21 and entries[0] is None
        assert [entry.token_id for entry in entries[1:]] == tokens[1:]
        assert [entry.logprob for entry in entries[1:]] == [float(-n) for n in range(1, 21)]
        lists.append(entries)
        assert world.seen[name].last is not None and world.seen[name].last.cached_tokens == 0
    assert lists[0] == lists[1] == lists[3]


def test_prompt_logprobs_survive_preemption() -> None:
    world = World(num_pages=8, page_size=4, max_model_len=32, budget=8)
    for name in range(4):
        world.add(str(name), prompt(name, 13), max_tokens=15, prompt_logprobs=0, ignore_eos=True)
    world.run()
    for name in range(4):
        entries = world.seen[str(name)].prompt_logprobs
        assert isinstance(entries, list)
        assert [entry.token_id for entry in entries[1:]] == prompt(name, 13)[1:]
        assert world.seen[str(name)].tokens[0] == expected(prompt(name, 13), 15, eos=False)


def test_reset_while_running_is_reported_and_takes_effect() -> None:
    """Pain A11."""
    world = World()
    world.add("old", prompt(2, 40), max_tokens=1)
    world.run()
    world.add("a", prompt(1, 40), max_tokens=30, ignore_eos=True)
    for _ in range(6):
        world.step()
    report = world.engine.reset_prefix_cache()
    assert report.freed_pages >= 10
    assert report.busy_pages >= 10
    world.check()
    world.run()
    assert world.seen["a"].tokens[0] == expected(prompt(1, 40), 30, eos=False)
    assert world.cache.stats().cached_pages == 0
    world.add("b", prompt(1, 40), max_tokens=1)
    world.run()
    assert world.seen["b"].last is not None and world.seen["b"].last.cached_tokens == 0
    world.add("c", prompt(1, 40), max_tokens=1)
    world.run()
    assert world.seen["c"].last is not None and world.seen["c"].last.cached_tokens == 39


def test_bypassing_the_cache_reads_and_stores_nothing() -> None:
    world = World()
    world.add("a", prompt(1, 40), max_tokens=5, n=2, temperature=1.0, seed=3, use_prefix_cache=False)
    world.run()
    assert world.cache.stats().cached_pages == 0
    assert world.seen["a"].tokens[1] == expected(prompt(1, 40), 5, seed=4, temperature=1.0)
    world.add("b", prompt(1, 40), max_tokens=5)
    world.run()
    world.add("c", prompt(1, 40), max_tokens=5, use_prefix_cache=False)
    world.run()
    assert world.seen["c"].last is not None and world.seen["c"].last.cached_tokens == 0


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on() -> None:
    world = World(num_pages=32)
    world.add("a", prompt(1, 20), max_tokens=30, ignore_eos=True)
    world.add("b", prompt(2, 20), max_tokens=30, n=2, ignore_eos=True)
    for _ in range(6):
        world.step()
    world.runner.fail_on = lambda plan: True
    world.step()
    for name in "ab":
        last = world.seen[name].last
        assert last is not None and last.finished and isinstance(last.error, EngineError)
        assert set(world.seen[name].reasons.values()) == {"error"}
    world.runner.fail_on = lambda plan: False
    assert world.idle_pages() == 0
    world.add("a2", prompt(1, 20), max_tokens=30, ignore_eos=True)
    world.run()
    assert world.seen["a2"].tokens[0] == expected(prompt(1, 20), 30, eos=False)


def test_queue_cap_and_bad_requests() -> None:
    world = World(queue=2)
    world.add("a", prompt(1, 5))
    world.add("b", prompt(1, 5))
    with pytest.raises(QueueFullError):
        world.add("c", prompt(1, 5))
    for bad in ([], [-1], [256], [1, 10**9]):
        with pytest.raises(InvalidRequestError):
            world.engine.validate(Request("x", bad, SamplingParams()))
    with pytest.raises(InvalidRequestError, match="token id 256"):
        world.engine.validate(Request("x", [1], SamplingParams(stop_token_ids=[256])))
    with pytest.raises(InvalidRequestError, match="9"):
        world.engine.validate(Request("x", [1], SamplingParams(n=9)))
    world.run()
    with pytest.raises(ConfigError):
        World(seats=64, budget=16)


def test_reports_add_up_over_preemptions_and_cancels() -> None:
    class Ledger(EngineObserver):
        def __init__(self) -> None:
            self.admitted: list[AdmissionReport] = []
            self.steps: list[StepReport] = []
            self.tokens: list[TokenReport] = []
            self.finished: list[FinishReport] = []

        def on_admission(self, report: AdmissionReport) -> None:
            self.admitted.append(report)

        def on_step(self, report: StepReport) -> None:
            self.steps.append(report)

        def on_token(self, report: TokenReport) -> None:
            self.tokens.append(report)

        def on_finish(self, report: FinishReport) -> None:
            self.finished.append(report)

    ledger = Ledger()
    world = World(num_pages=12, page_size=4, max_model_len=48, observer=ledger)
    for name in range(6):
        world.add(str(name), prompt(name, 10), max_tokens=20, ignore_eos=True, n=2, temperature=1.0)
    for _ in range(12):
        world.step()
    world.abort("5")
    world.run()
    assert len(ledger.admitted) in (5, 6)
    assert sum(report.preemptions for report in ledger.steps) > 0
    assert sum(report.generated_tokens for report in ledger.steps) == len(ledger.tokens)
    assert sum(report.generated_tokens for report in ledger.finished) == len(ledger.tokens)
    assert sum(report.computed_tokens for report in ledger.steps) == world.runner.computed_tokens
    assert sum(report.last_of_request for report in ledger.finished) == 6
    assert sum(report.first for report in ledger.tokens) == sum(1 for r in ledger.finished if r.generated_tokens)


@pytest.mark.parametrize("seed", first(20, range(60)))
def test_random_worlds(seed: int) -> None:
    """Random pools, prompts that share prefixes, forks and cancels: survivors' text equals the plain run's."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 16])
    world = World(
        num_pages=rng.randrange(-(-40 // page_size), 200 // page_size + 12),
        page_size=page_size,
        max_model_len=40,
        seats=rng.randrange(2, 10),
        budget=rng.choice([10, 16, 64]),
        index=rng.choice(["radix", "hash", "none"]),
    )
    trunks = [prompt(1000 + i, rng.randrange(1, 24)) for i in range(3)]
    alive: dict[str, tuple[list[int], int, int, int]] = {}
    for turn in range(120):
        if turn < 80 and rng.random() < 0.4:
            tokens = rng.choice(trunks)[: rng.randrange(1, 24)] + prompt(rng.randrange(5), rng.randrange(0, 6))
            n = rng.choice([1, 1, 1, min(3, world.engine.config.max_num_seqs)])
            max_tokens = rng.randrange(0, 12)
            world.add(str(turn), tokens, n=n, max_tokens=max_tokens, temperature=1.0, seed=turn)
            alive[str(turn)] = (tokens, n, max_tokens, turn)
        if alive and rng.random() < 0.05:
            name = rng.choice(list(alive))
            world.abort(name)
            del alive[name]
        if rng.random() < 0.02:
            world.engine.reset_prefix_cache()
            world.check()
        world.step()
    world.run()
    assert world.idle_pages() == 0
    for name, (tokens, n, max_tokens, first_seed) in alive.items():
        for index in range(n if max_tokens else 1):
            want = expected(tokens, max_tokens, seed=first_seed + index, temperature=1.0)
            assert world.seen[name].tokens[index] == want, (seed, name, index)


# -- held prefixes ---------------------------------------------------------------------------------------------------


def test_held_prefixes_survive_load_that_fits_beside_them() -> None:
    world = World(num_pages=16, page_size=4)
    trunk = prompt(1, 32)
    world.add("warm", trunk, max_tokens=0)
    world.run()
    hold = world.cache.hold(trunk, world.engine.namespace(""))
    assert hold.tokens == 32
    for number in range(6):
        world.add(f"r{number}", prompt(number + 2, 12), max_tokens=12)
    world.run()
    assert not hold.released
    world.add("again", [*trunk, 5], max_tokens=1)
    world.run()
    assert world.seen["again"].last is not None and world.seen["again"].last.cached_tokens == 32


@pytest.mark.parametrize("long", [40, 60])
def test_held_prefixes_give_way_to_what_could_not_run_otherwise(long: int) -> None:
    """A prompt that needs the whole pool is taken at the door, so it must run, at its start or as it grows."""
    world = World(num_pages=16, page_size=4)
    for seed in (1, 2):
        world.add(f"warm{seed}", prompt(seed, 16), max_tokens=0)
        world.run()
    holds = [world.cache.hold(prompt(seed, 16), world.engine.namespace("")) for seed in (1, 2)]
    world.add("big", prompt(3, long), max_tokens=64 - long)
    world.add("next", prompt(4, 30), max_tokens=20)
    world.run(2000)
    assert world.seen["big"].tokens[0] == expected(prompt(3, long), 64 - long)
    assert world.seen["next"].tokens[0] == expected(prompt(4, 30), 20)
    assert all(hold.released for hold in holds)


def test_only_as_many_held_prefixes_give_way_as_must() -> None:
    world = World(num_pages=16, page_size=4)
    for seed in (1, 2):
        world.add(f"warm{seed}", prompt(seed, 16), max_tokens=0)
        world.run()
    first, second = (world.cache.hold(prompt(seed, 16), world.engine.namespace("")) for seed in (1, 2))
    first.touch()
    world.add("big", prompt(3, 40), max_tokens=8)  # 12 pages: one of the two has to go, the one longer unused
    world.run()
    assert world.seen["big"].tokens[0] == expected(prompt(3, 40), 8)
    assert second.released and not first.released
