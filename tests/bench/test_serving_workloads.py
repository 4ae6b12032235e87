"""Workloads: the same prompts every time, of the promised lengths and shapes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from bench.serving_workloads import WORKLOADS, Words
from tests.bench.words import WordTokenizer

WORDS = Words(WordTokenizer())


@dataclass
class Recorder:
    """Takes the place of a client: keeps what was asked and how much of it at a time."""

    reply: str = " aaaa"
    asked: list[tuple[tuple[int, ...], int, bool]] = field(default_factory=list)
    running: int = 0
    most: int = 0

    async def ask(self, prompt: list[int], max_tokens: int, measured: bool = True) -> str:
        self.asked.append((tuple(prompt), max_tokens, measured))
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(3):
            await asyncio.sleep(0)  # let the others come
        self.running -= 1
        return self.reply * max_tokens


def record(name: str, reply: str = " aaaa") -> Recorder:
    recorder = Recorder(reply)
    asyncio.run(WORKLOADS[name].prepare(WORDS)(recorder.ask))
    return recorder


def shared(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_every_time_and_keeps_its_limits(name: str) -> None:
    recorder, workload = record(name), WORKLOADS[name]
    assert recorder.asked == record(name).asked
    assert recorder.most == workload.at_a_time
    assert max(len(prompt) + output for prompt, output, _ in recorder.asked) <= workload.longest


@pytest.mark.parametrize(
    ("name", "requests", "lengths", "output"),
    [
        ("single", 1, {32}, 128),
        ("prefill", 3, {2000}, 1),
        ("warm", 4, {2000}, 1),
        ("unique", 16, {250}, 64),
        ("shared", 32, {1088}, 64),
        ("fanout", 50, {2064}, 64),
        ("tree", 256, {672}, 24),
        ("chat", 48, {320, 448, 576, 704, 832, 960}, 64),
        ("agents", 64, set(range(1040, 1040 + 16 * 80, 80)), 32),
    ],
)
@pytest.mark.parametrize("reply", [" aaaa", ""])
def test_lengths_are_the_promised_ones_whatever_the_replies(
    name: str, requests: int, lengths: set[int], output: int, reply: str
) -> None:
    asked = record(name, reply).asked
    assert len(asked) == requests
    assert {out for _, out, _ in asked} == {output}
    assert {len(prompt) for prompt, _, _ in asked} == lengths


def test_unrelated_prompts_share_next_to_nothing_and_users_exactly_their_prefix() -> None:
    unique = [prompt for prompt, _, _ in record("unique").asked]
    assert max(shared(first, second) for first in unique for second in unique if first is not second) <= 1
    users = [prompt for prompt, _, _ in record("fanout").asked]
    assert len({prompt[:2000] for prompt in users}) == 1
    assert len({prompt[2000:] for prompt in users}) == 50


def test_warm_measures_what_follows_the_priming_request() -> None:
    asked = record("warm").asked
    assert [measured for _, _, measured in asked] == [False, True, True, True]
    assert {shared(asked[0][0], prompt) // 10 for prompt, _, _ in asked[1:]} == {190}


def test_tree_has_prefixes_at_two_depths() -> None:
    prompts = [prompt for prompt, _, _ in record("tree").asked]
    assert [len({prompt[:depth] for prompt in prompts}) for depth in (256, 640, 672)] == [8, 32, 256]


def test_a_conversation_goes_on_from_what_was_said() -> None:
    asked = record("chat").asked
    last = [prompt for prompt, _, _ in asked if len(prompt) == 960]
    assert len(last) == 8
    reply = tuple(WORDS.encode(" aaaa" * 64))
    for prompt in last:
        earlier = [other for other, _, _ in asked if other == prompt[: len(other)] and len(other) < 960]
        assert len(earlier) == 5
        assert all(prompt[len(other) : len(other) + 64] == reply for other in earlier)


def test_agents_branch_from_one_trunk() -> None:
    asked = [prompt for prompt, _, _ in record("agents").asked]
    for step in range(16):
        trunk = 1024 + 80 * step
        branches = asked[4 * step : 4 * step + 4]
        assert len({prompt[:trunk] for prompt in branches}) == 1
        assert len(set(branches)) == 4
        assert asked[60][: trunk + 16] == branches[0]


def test_prompts_survive_as_text() -> None:
    ids = WORDS.draw(random.Random(3), 500)
    assert WORDS.encode(WordTokenizer().decode(ids)) == ids
    assert min(ids) >= 3


def test_words_that_do_not_survive_are_refused() -> None:
    class Joining(WordTokenizer):
        def encode(self, text: str, *, add_special: bool = True) -> list[int]:
            ids = super().encode(text)
            return ids if len(ids) == 1 else [0, *ids]

    with pytest.raises(ValueError, match="survive"):
        Words(Joining()).draw(random.Random(0), 5)
    with pytest.raises(ValueError, match="only 47 whole words"):
        Words(WordTokenizer(50))
