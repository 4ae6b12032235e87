"""Beams in the engine, over the toy model: shared pages, preemption of the whole group, endings."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetrie.engine.beam_search import Beam, BeamSearch
from pagetrie.engine.params import SamplingParams
from pagetrie.errors import InvalidRequestError
from tests.engine.test_contexts import Branches
from tests.engine.toy import EOS, World, expected, toy_candidates


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 200) for _ in range(length)]


def searched(ids: list[int], n: int = 1, **options: object) -> list[Beam]:
    """The hypotheses without any engine or cache."""
    search = BeamSearch(end_ids=[EOS], **options)  # type: ignore[arg-type]
    while not search.done:
        search.advance([toy_candidates([*ids, *beam.tokens], search.candidates) for beam in search.live])
    return search.best(n)


def check(world: World, name: str, ids: list[int], n: int = 1, **options: object) -> None:
    """A request's answer is that of the bare search."""
    best = searched(ids, n, **options)
    seen = world.seen[name]
    assert [seen.tokens[index] for index in range(n)] == [beam.tokens for beam in best]
    assert [seen.reasons[index] for index in range(n)] == ["length" if beam.end is None else "stop" for beam in best]
    assert seen.last is not None and seen.last.finished
    assert seen.last.completion_tokens == sum(len(beam.tokens) for beam in best)


@pytest.mark.parametrize("index", ["radix", "hash", "none"])
@pytest.mark.parametrize("width", [1, 2, 4, 6])
def test_the_best_hypotheses_are_handed_out_at_the_end(index: str, width: int) -> None:
    world = World(index=index)
    for number in range(6):
        ids = prompt(number, 3 + 4 * number)
        n = min(width, 1 + number % 3)
        world.add(f"r{number}", ids, n=n, beam_width=width, max_tokens=12, length_penalty=0.5)
        world.run()
        check(world, f"r{number}", ids, n, width=width, max_tokens=12, length_penalty=0.5)
    assert world.idle_pages() == 0


def test_beams_hold_what_they_have_in_common_once() -> None:
    world = World(num_pages=64)
    world.add("a", prompt(1, 40), beam_width=4, max_tokens=8, ignore_eos=True)
    most = 0
    while world.engine.has_work:
        world.step()
        most = max(most, world.idle_pages())
    # 10 pages of prompt, and per beam at most the 2 or 3 that its 8 tokens touch: not 4 * 12 pages.
    assert most <= 10 + 4 * 3
    assert world.runner.computed_tokens == 40 + 7 * 4


def test_a_group_is_preempted_and_resumed_as_a_whole_with_the_same_answer() -> None:
    world = World(num_pages=20, seats=8, budget=16)
    world.add("first", prompt(1, 12), priority=-1, max_tokens=40, ignore_eos=True)
    world.add("beams", prompt(2, 20), n=3, beam_width=4, max_tokens=14)
    lengths = set()  # of what the beams have in common when they lose their pages
    while world.engine.has_work:
        world.step()
        lengths |= {len(sequence.ids) for sequence in world.engine._scheduler.waiting if sequence.preemptions}
    assert lengths
    assert max(lengths) > 20
    assert world.seen["first"].tokens[0] == expected(prompt(1, 12), 40, eos=False)
    check(world, "beams", prompt(2, 20), 3, width=4, max_tokens=14)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mix_of_beams_and_others_in_any_pool_gives_the_answers_of_solo_runs(data: st.DataObject) -> None:
    pages = data.draw(st.integers(14, 60), label="pages")
    world = World(
        num_pages=pages,
        seats=data.draw(st.integers(5, 10), label="seats"),
        budget=data.draw(st.integers(10, 20), label="budget"),
        index=data.draw(st.sampled_from(["radix", "hash", "none"]), label="index"),
    )
    wanted = []
    for number in range(data.draw(st.integers(1, 5), label="requests")):
        ids = prompt(data.draw(st.integers(0, 2)), data.draw(st.integers(1, 16)))
        width = data.draw(st.sampled_from([0, 2, 3, 4]))
        n = data.draw(st.integers(1, max(1, min(2, width))))
        tokens = data.draw(st.integers(1, 8))  # four beams of 8 tokens on 16 fit 14 pages of 4
        options = {"priority": data.draw(st.integers(-1, 1)), "n": n, "max_tokens": tokens}
        world.add(f"r{number}", ids, **options, **({"beam_width": width} if width else {"temperature": 0.0}))  # type: ignore[arg-type]
        wanted.append((f"r{number}", ids, width, n, tokens))
        for _ in range(data.draw(st.integers(0, 3))):
            world.step()
    world.run()
    for name, ids, width, n, tokens in wanted:
        if width:
            check(world, name, ids, n, width=width, max_tokens=tokens)
        else:
            assert world.seen[name].tokens[0] == expected(ids, tokens)
    assert world.idle_pages() == 0


def test_beams_that_outgrow_the_pool_end_with_what_they_have() -> None:
    world = World(num_pages=8, page_size=4)
    world.add("a", prompt(1, 16), n=2, beam_width=4, max_tokens=16, ignore_eos=True)
    world.run()
    for index in range(2):
        assert world.seen["a"].reasons[index] == "length"
        assert 0 < len(world.seen["a"].tokens[index]) < 16
    assert world.idle_pages() == 0


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_an_abort_in_any_phase_ends_every_choice_and_gives_the_pages_back(steps: int) -> None:
    world = World(budget=8)
    world.add("a", prompt(1, 20), n=2, beam_width=3, max_tokens=9, ignore_eos=True)
    for _ in range(steps):
        world.step()
    output = world.engine.abort("a")
    assert output is not None and output.finished
    assert [delta.finish_reason for delta in output.choices] == ["abort", "abort"]
    assert world.idle_pages() == 0 and not world.engine.has_work
    world.check()


def test_a_failing_step_ends_the_group_with_an_error() -> None:
    world = World()
    world.add("a", prompt(1, 20), beam_width=3, max_tokens=9)
    world.step()
    world.step()
    world.runner.fail_on = lambda plan: True
    world.step()
    assert world.seen["a"].reasons == {0: "error"}
    assert world.idle_pages() == 0


def test_a_stop_token_id_ends_a_beam_and_is_named() -> None:
    world = World()
    ids = prompt(3, 9)
    stops = [token for token, _ in toy_candidates(ids, 3)][:2]
    world.add("a", ids, beam_width=2, n=2, max_tokens=9, stop_token_ids=stops, early_stopping=True)
    world.run()
    assert set(world.seen["a"].reasons.values()) == {"stop"}
    assert {world.seen["a"].stop_reasons[index] for index in range(2)} <= {*stops, None}
    assert any(world.seen["a"].stop_reasons[index] in stops for index in range(2))


def test_beams_after_a_context() -> None:
    world = Branches()
    context = world.create(prompt(1, 30))
    name = world.generate(context, [5, 6], beam_width=3, max_tokens=6)
    check(world, name, [*prompt(1, 30), 5, 6], 1, width=3, max_tokens=6)
    assert world.cached(name) == 30
    with pytest.raises(InvalidRequestError, match="can be appended"):
        world.start(context, [5], beam_width=3, append=True)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"beam_width": 2, "n": 3}, r"n \(3\) must not exceed beam_width \(2\)"),
        ({"beam_width": 129}, "beam_width must be between 0 and 128"),
        ({"beam_width": 2, "stop": ("x",)}, "stop can't be combined"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature can't be combined"),
        ({"beam_width": 2, "top_p": 0.5}, "top_p can't be combined"),
        ({"beam_width": 2, "logit_bias": {1: 2.0}}, "logit_bias can't be combined"),
        ({"beam_width": 2, "min_tokens": 2}, "min_tokens can't be combined"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping must be"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty must be"),
        ({"length_penalty": 2.0}, "length_penalty needs a beam search"),
        ({"early_stopping": True}, "early_stopping needs a beam search"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(params: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        SamplingParams(**params)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("world", "length", "width", "words"),
    [
        ({"seats": 3}, 5, 4, r"beam_width \(4\) exceeds the server's limit of 3"),
        ({"num_pages": 6}, 17, 3, "3 beams on 17 tokens take 7 pages, but the cache has 6"),
        ({"seats": 128, "budget": 128, "num_pages": 500}, 5, 128, None),
    ],
)
def test_what_can_never_fit_is_refused_at_the_door(
    world: dict[str, int], length: int, width: int, words: str | None
) -> None:
    made = World(**world)  # type: ignore[arg-type]
    if words is None:
        made.add("a", prompt(1, length), beam_width=width)
        return
    with pytest.raises(InvalidRequestError, match=words):
        made.add("a", prompt(1, length), beam_width=width)
