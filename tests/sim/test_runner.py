"""The simulated runner: page contents, costs, time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetrie.engine.config import EngineConfig
from pagetrie.engine.engine import Engine
from pagetrie.engine.output import RequestOutput
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.engine.runner import SampleSpec, SequenceStep, StepPlan
from pagetrie.kv import CacheManager
from pagetrie.sim import PageContentError, PageMemory, SimRunner, StepCost, VirtualClock, extend_prefix
from pagetrie.sim.memory import EMPTY_PREFIX
from tests.simulation.vocabulary import AwkwardVocabulary

COST = StepCost(per_step=1.0, per_token=0.1, per_attended=0.01, per_copy=0.5)


def prefix_of(tokens: list[int]) -> int:
    prefix = EMPTY_PREFIX
    for token in tokens:
        prefix = extend_prefix(prefix, token)
    return prefix


def runner(num_pages: int = 8, page_size: int = 4) -> SimRunner:
    return SimRunner(memory=PageMemory(num_pages, page_size), clock=VirtualClock(), cost=COST, vocab_size=100)


def spec(**params: object) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), seed=5, prompt_ids=[1], output_ids=[])  # type: ignore[arg-type]


def test_the_clock_only_goes_on() -> None:
    clock = VirtualClock(2.0)
    clock.advance(0.5)
    assert clock() == clock.now == 2.5
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="can't go back"):
            clock.advance(wrong)


def test_a_step_costs_the_sum_of_its_parts() -> None:
    plan = StepPlan(
        copies=[(0, 1), (2, 3)],
        sequences=[SequenceStep([1, 2, 3], 0, [4]), SequenceStep([9], 10, [5, 6, 7])],
    )
    # The prompt's tokens see 1 + 2 + 3 positions, the decoded one 10 and itself.
    assert COST.seconds(plan) == pytest.approx(1.0 + 0.1 * 4 + 0.01 * (6 + 11) + 0.5 * 2)


def test_executing_takes_time_and_draws_by_the_prefix_alone() -> None:
    one, other = runner(), runner(page_size=2)
    whole = one.execute(StepPlan([], [SequenceStep([1, 2, 3, 4, 5], 0, [7, 0], [spec()])]))
    other.execute(StepPlan([], [SequenceStep([1, 2, 3], 0, [0, 1, 2])]))
    parts = other.execute(StepPlan([], [SequenceStep([4, 5], 3, [0, 1, 2], [spec()])]))
    assert whole[0].samples == parts[0].samples
    assert one.clock.now == pytest.approx(1.0 + 0.5 + 0.15)


def test_draws_differ_by_seed_and_number_only_with_a_temperature() -> None:
    step = StepPlan([], [SequenceStep([1, 2, 3], 0, [0], [spec(), spec(temperature=0.0), spec(temperature=0.0)])])
    drawn, greedy, again = runner().execute(step)[0].samples
    assert greedy == again
    assert drawn.token_id != greedy.token_id


def test_banned_ids_are_never_drawn() -> None:
    plan = StepPlan([], [SequenceStep([1, 2, 3], 0, [0], [spec(temperature=0.0)])])
    likeliest = runner().execute(plan)[0].samples[0].token_id
    plan.sequences[0].samples[0].banned_ids = (likeliest,)
    assert runner().execute(plan)[0].samples[0].token_id == (likeliest + 1) % 100


def test_prompt_logprobs_come_for_every_target() -> None:
    plan = StepPlan([], [SequenceStep([1, 2, 3], 0, [0], prompt_targets=[2, 3], prompt_logprobs=2)])
    entries = runner().execute(plan)[0].prompt_logprobs
    assert [entry.token_id for entry in entries] == [2, 3]
    assert all(entry.logprob < 0 and len(entry.top) == 2 for entry in entries)


def test_reading_an_unwritten_page_is_noticed() -> None:
    with pytest.raises(PageContentError, match="position 3 was never written"):
        runner().execute(StepPlan([], [SequenceStep([9], 4, [0, 1])]))
    sim = runner()
    sim.execute(StepPlan([], [SequenceStep([1, 2, 3, 4, 5], 0, [0, 1])]))
    sim.memory.clear([0])
    with pytest.raises(PageContentError, match="holds 0 of the 4 tokens"):
        sim.execute(StepPlan([], [SequenceStep([6], 5, [0, 1])]))


def test_a_table_without_a_page_for_the_tokens_is_noticed() -> None:
    with pytest.raises(PageContentError, match="position 4 has no page"):
        runner().execute(StepPlan([], [SequenceStep([1, 2, 3, 4, 5], 0, [0])]))


def test_a_page_of_another_prefix_is_noticed() -> None:
    sim = runner()
    sim.execute(StepPlan([], [SequenceStep([1, 2, 3, 4, 5], 0, [0, 1]), SequenceStep([9, 9, 9, 9], 0, [2])]))
    with pytest.raises(PageContentError, match="continues another prefix"):
        sim.execute(StepPlan([], [SequenceStep([6], 5, [2, 1])]))


def test_an_overwritten_page_is_noticed_in_the_same_step() -> None:
    sim = runner()
    sim.execute(StepPlan([], [SequenceStep([1, 2, 3, 4], 0, [0])]))
    with pytest.raises(PageContentError, match="continues another prefix"):
        sim.execute(StepPlan([], [SequenceStep([5], 4, [0, 1]), SequenceStep([7, 7, 7, 7], 0, [0])]))


def test_copies_run_in_order_before_the_writes() -> None:
    sim = runner()
    sim.execute(StepPlan([], [SequenceStep([1, 2], 0, [0])]))
    shares = [SequenceStep([3], 2, [2], [spec()]), SequenceStep([7, 7, 7], 0, [0])]
    assert sim.execute(StepPlan([(0, 1), (1, 2)], shares))[0].samples == (
        runner().execute(StepPlan([], [SequenceStep([1, 2, 3], 0, [5], [spec()])]))[0].samples
    )


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 6), st.data())
def test_any_chunks_store_the_same_prefix(tokens: list[int], page_size: int, data: st.DataObject) -> None:
    memory = PageMemory(40, page_size)
    table = data.draw(st.permutations(range(40)))
    start = 0
    while start < len(tokens):
        count = data.draw(st.integers(1, len(tokens) - start))
        memory.write(table, start, tokens[start : start + count])
        start += count
    for end in range(len(tokens) + 1):
        assert memory.read(table, end) == prefix_of(tokens[:end])
    assert memory.prefixes(table, 0, len(tokens)) == [prefix_of(tokens[: end + 1]) for end in range(len(tokens))]


def test_an_engine_runs_on_it() -> None:
    """A shared prefix is found, and the virtual time is the cost of what was left to compute."""
    clock = VirtualClock()
    engine = Engine(
        runner=SimRunner(memory=PageMemory(32, 4), clock=clock, cost=COST, vocab_size=AwkwardVocabulary.vocab_size),
        cache=CacheManager(num_pages=32, page_size=4),
        vocabulary=AwkwardVocabulary(),
        config=EngineConfig(max_model_len=100),
        clock=clock,
        rng=random.Random(0),
    )
    prompt = [3 + number % 30 for number in range(50)]
    last: list[RequestOutput] = []
    for name in ("cold", "warm"):
        started = clock.now
        engine.add(Request(name, prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
        last = engine.step()
        computed = 50 - last[0].cached_tokens
        attended = sum(range(51 - computed, 51))
        copies = 1 if name == "warm" else 0
        assert clock.now - started == pytest.approx(1.0 + 0.1 * computed + 0.01 * attended + 0.5 * copies)
    assert last[0].cached_tokens == 49
