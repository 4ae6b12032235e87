"""The workloads of ``python -m bench serving``: prompts from fixed seeds, and who asks what when.

Prompts are random English words, each one token of the model's vocabulary, so that ids and text are the same prompt.
A workload's prompts are made before its clock starts; only a conversation's replies enter prompts afterwards.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Ask = Callable[..., Awaitable[str]]
"""``ask(prompt, max_tokens, measured=True)``: complete token ids, give the reply's text."""

Script = Callable[[Ask], Awaitable[None]]
"""Puts a workload's requests to a system, in its order and as many at a time as it says."""

_WORD = re.compile(rb" [a-z]{3,}")


class TokenizerLike(Protocol):
    vocab_size: int

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Words:
    """Draws prompts from a model's vocabulary."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._ids = [
            index
            for index in range(tokenizer.vocab_size)
            if _WORD.fullmatch(tokenizer.token_bytes(index))
            and tokenizer.encode(tokenizer.token_bytes(index).decode(), add_special=False) == [index]
        ]
        if len(self._ids) < 100:
            raise ValueError(f"the vocabulary has only {len(self._ids)} whole words, prompts need 100 or more")

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """``count`` token ids whose text encodes to the same ids; raises ValueError if it wouldn't."""
        ids = rng.choices(self._ids, k=count)
        if self._tokenizer.encode(self._tokenizer.decode(ids), add_special=False) != ids:
            raise ValueError("words of the vocabulary don't survive being written as text")
        return ids

    def encode(self, text: str) -> list[int]:
        """A reply's token ids, as a client that only sees text would have them."""
        return self._tokenizer.encode(text, add_special=False)


@dataclass(frozen=True, slots=True)
class Workload:
    """One row of the benchmark.

    Attributes:
        metric: what ranks systems: the median time to first token, or output tokens per second of the whole run.
        at_a_time: most requests in flight.
        longest: most tokens of one sequence, prompt and output together.
        script: makes the prompts (from words and a seeded generator) and returns what puts them to a system.
    """

    name: str
    what: str
    metric: Literal["ttft", "rate"]
    at_a_time: int
    longest: int
    script: Callable[[Words, random.Random], Script]

    def prepare(self, words: Words) -> Script:
        """The script, the same for every system and round."""
        return self.script(words, random.Random(f"pagetrie {self.name}"))


async def _all(ask: Ask, prompts: Sequence[list[int]], max_tokens: int, at_a_time: int) -> None:
    """Every prompt once, in order, ``at_a_time`` in flight; the first failure ends the rest."""
    queue = iter(prompts)

    async def worker() -> None:
        for prompt in queue:
            await ask(prompt, max_tokens)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_a_time, len(prompts))):
            group.create_task(worker())


def _flat(
    make: Callable[[Words, random.Random], list[list[int]]], max_tokens: int, at_a_time: int
) -> Callable[..., Script]:
    def script(words: Words, rng: random.Random) -> Script:
        prompts = make(words, rng)
        return lambda ask: _all(ask, prompts, max_tokens, at_a_time)

    return script


def _unrelated(count: int, length: int) -> Callable[[Words, random.Random], list[list[int]]]:
    return lambda words, rng: [words.draw(rng, length) for _ in range(count)]


def _users(count: int, shared: int, own: int) -> Callable[[Words, random.Random], list[list[int]]]:
    def make(words: Words, rng: random.Random) -> list[list[int]]:
        prefix = words.draw(rng, shared)
        return [prefix + words.draw(rng, own) for _ in range(count)]

    return make


def _tree(words: Words, rng: random.Random) -> list[list[int]]:
    prompts = []
    for _ in range(8):
        tenant = words.draw(rng, 256)
        for _ in range(4):
            document = tenant + words.draw(rng, 384)
            prompts += [document + words.draw(rng, 32) for _ in range(8)]
    rng.shuffle(prompts)
    return prompts


def _warm(words: Words, rng: random.Random) -> Script:
    shared = words.draw(rng, 1900)
    prime, *others = [shared + words.draw(rng, 100) for _ in range(4)]

    async def script(ask: Ask) -> None:
        await ask(prime, 1, measured=False)
        for prompt in others:
            await ask(prompt, 1)

    return script


def _chat(words: Words, rng: random.Random) -> Script:
    system, turns, spoken, reply_tokens = 256, 6, 64, 64
    shared = words.draw(rng, system)
    # What a user says fills each prompt to one length for all systems, however many tokens the replies' texts make.
    said = [[words.draw(rng, 4 * spoken) for _ in range(turns)] for _ in range(8)]

    async def session(ask: Ask, messages: list[list[int]]) -> None:
        prompt = list(shared)
        for turn, message in enumerate(messages):
            length = system + spoken + turn * (spoken + reply_tokens)
            prompt += message[: max(1, length - len(prompt))]
            prompt += words.encode(await ask(prompt, reply_tokens))

    async def script(ask: Ask) -> None:
        async with asyncio.TaskGroup() as group:
            for messages in said:
                group.create_task(session(ask, messages))

    return script


def _agents(words: Words, rng: random.Random) -> Script:
    trunk_tokens, branches, steps, own, output, grown = 1024, 4, 16, 16, 32, 80
    start = words.draw(rng, trunk_tokens)
    tasks = [[words.draw(rng, own) for _ in range(branches)] for _ in range(steps)]
    seen = [words.draw(rng, grown * 4) for _ in range(steps)]

    async def script(ask: Ask) -> None:
        trunk = list(start)
        for step in range(steps):
            async with asyncio.TaskGroup() as group:
                replies = [group.create_task(_text(ask(trunk + task, output))) for task in tasks[step]]
            # The first branch is taken: its task and reply join the trunk, then what was observed, up to a set length.
            trunk += tasks[step][0] + words.encode(replies[0].result())
            trunk += seen[step][: max(1, trunk_tokens + (step + 1) * grown - len(trunk))]

    return script


async def _text(reply: Awaitable[str]) -> str:
    return await reply


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("single", "one stream, 32 in / 128 out", "rate", 1, 160, _flat(_unrelated(1, 32), 128, 1)),
        Workload("prefill", "2,000 new tokens", "ttft", 1, 2001, _flat(_unrelated(3, 2000), 1, 1)),
        Workload("warm", "2,000 tokens, 1,900 of them cached", "ttft", 1, 2001, _warm),
        Workload("unique", "16 x 250 in / 64 out, 8 at a time", "rate", 8, 314, _flat(_unrelated(16, 250), 64, 8)),
        Workload(
            "shared",
            "32 users on one 1,024-token prefix, +64 in / 64 out, 16 at a time",
            *("rate", 16, 1152, _flat(_users(32, 1024, 64), 64, 16)),
        ),
        Workload(
            "fanout",
            "50 users on one 2,000-token prefix, +64 in / 64 out, all at once",
            *("rate", 50, 2128, _flat(_users(50, 2000, 64), 64, 50)),
        ),
        Workload(
            "tree",
            "8 tenants (256 tokens) x 4 documents (384) x 8 questions, +32 in / 24 out, 16 at a time",
            *("rate", 16, 696, _flat(_tree, 24, 16)),
        ),
        Workload("chat", "8 sessions x 6 turns on one 256-token prompt, +64 in / 64 out", "rate", 8, 1100, _chat),
        Workload(
            "agents", "4 branches x 16 steps on a trunk growing from 1,024 tokens, 32 out", "rate", 4, 2500, _agents
        ),
    )
}
