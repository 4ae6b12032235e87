"""A model on a disk cache whose process is killed again and again: ``python -m tests.e2e.killing FOLDER ROUNDS``.

The model is opened once; each round is a fork of this process, with an engine, a cache and threads of its own. It says
what it does through a pipe, and is killed at a random one of its words, half-written pages among them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pagetrie.assembly import Parts, build
from pagetrie.bundled import bundled_model_path
from pagetrie.engine.engine import Engine
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.kv import CacheManager
from pagetrie.kv.keys import ChainKeys
from pagetrie.kv.tiers.disk import DiskTier
from pagetrie.kv.tiers.folder import CacheFolder
from pagetrie.kv.tiers.stack import TierStack
from pagetrie.kv.transfers import Transfers
from pagetrie.settings import Settings

CAPACITY = 14 << 20
"""Less than all prompts' pages take, so that there is always something to write."""

TRUNK = [300 + 7 * number for number in range(48)]
PROMPTS = [[*TRUNK, *(1000 * (chat + 1) + 11 * number for number in range(65))] for chat in range(12)]
MOST_WORDS = 30


def complete(engine: Engine, prompt: Sequence[int]) -> tuple[list[int], int]:
    """The greedy answer, and how many tokens were cached."""
    engine.add(Request("r", list(prompt), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)))
    tokens, cached = [], 0
    while engine.has_work:
        for output in engine.step():
            cached = output.cached_tokens
            for delta in output.choices:
                tokens += delta.token_ids
    return tokens, cached


def serve(parts: Parts, folder: Path, right: list[list[int]], order: list[int], pipe: int) -> None:
    """Begin on whatever is in the folder and answer until killed."""
    write = os.pwritev

    def torn(descriptor: int, buffers: list[bytes], offset: int) -> int:
        whole = b"".join(buffers)
        os.pwrite(descriptor, whole[: len(whole) // 2], offset)
        os.write(pipe, b"torn\n")
        return write(descriptor, buffers, offset)

    os.pwritev = torn
    tier = DiskTier(CacheFolder(folder), CAPACITY)
    storage = parts.engine._runner.storage  # type: ignore[attr-defined]
    transfers = Transfers(TierStack([tier], storage), ChainKeys(tier.folder.secret))
    cache = CacheManager(num_pages=storage.num_pages, page_size=parts.cache.page_size, transfers=transfers)
    engine = Engine(
        runner=parts.engine._runner,
        cache=cache,
        vocabulary=parts.tokenizer,
        config=parts.engine.config,
        clock=tier._clock,
        rng=random.Random(0),
    )
    os.write(pipe, b"open\n")
    for chat in order:
        tokens, cached = complete(engine, PROMPTS[chat])
        os.write(pipe, b"hit\n" if cached else b"miss\n")
        if tokens != right[chat]:
            os.write(pipe, b"wrong\n")
        cache.check()
    engine.close()
    os.write(pipe, b"end\n")


def main(folder: Path, rounds: int) -> dict[str, int]:
    """How often each word was heard, and "kills"."""
    settings = Settings(model=bundled_model_path(), threads=1, num_pages=110, max_model_len=256)
    parts = build(settings)
    right = [complete(parts.engine, prompt)[0] for prompt in PROMPTS]
    rng = random.Random(0)
    heard = {"kills": 0}
    for number in range(rounds + 1):
        order = rng.sample(range(len(PROMPTS)), len(PROMPTS))
        words = rng.randrange(1, MOST_WORDS) if number < rounds else None  # the last one may end
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            os.close(reading)
            serve(parts, folder, right, order, writing)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as lines:
            for count, line in enumerate(lines):
                word = line.strip()
                heard[word] = heard.get(word, 0) + 1
                if count == words:
                    os.kill(process, signal.SIGKILL)
                    heard["kills"] += 1
                    break
            os.waitpid(process, 0)
    return heard


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
