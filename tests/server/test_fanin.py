"""Merging the outputs of several engine requests."""

from __future__ import annotations

import asyncio

import pytest

from pagetrie.engine.output import ChoiceDelta, RequestOutput
from pagetrie.engine.runner import TokenLogprob
from pagetrie.errors import DeadlineExceededError, EngineError
from pagetrie.server.errors import ServerStoppingError
from pagetrie.server.fanin import OutputStream

pytestmark = pytest.mark.anyio


class Fed:
    """A source that the test feeds."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue = asyncio.Queue()
        self.closed = 0

    def __aiter__(self):
        return self

    async def __anext__(self) -> RequestOutput:
        item = await self.queue.get()
        if item is None:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        self.closed += 1

    def feed(self, *choices: ChoiceDelta, finished: bool = False, **numbers) -> None:
        self.queue.put_nowait(RequestOutput("r", list(choices), finished=finished, **numbers))
        if finished:
            self.queue.put_nowait(None)


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_waits_for_the_consumer_is_joined_per_choice():
    source = Fed()
    outputs = OutputStream([source], n=2)
    entries = [TokenLogprob(i, -1.0) for i in range(3)]
    source.feed(ChoiceDelta(0, "a", [1], entries[:1]), ChoiceDelta(1, "x", [7]), completion_tokens=2)
    source.feed(ChoiceDelta(0, "b", [2], entries[1:2]), completion_tokens=3)
    source.feed(ChoiceDelta(0, "c", [3], entries[2:], "stop"), completion_tokens=4)
    await settle()
    batches = aiter(outputs)
    first = await anext(batches)
    assert first == [ChoiceDelta(0, "abc", [1, 2, 3], entries, "stop"), ChoiceDelta(1, "x", [7])]
    source.feed(ChoiceDelta(1, "y", [8], finish_reason="length"), completion_tokens=5, finished=True)
    assert await anext(batches) == [ChoiceDelta(1, "y", [8], finish_reason="length")]
    with pytest.raises(StopAsyncIteration):
        await anext(batches)
    assert outputs.usage()["completion_tokens"] == 5
    await outputs.aclose()


async def test_usage_adds_up_over_prompts():
    sources = [Fed(), Fed()]
    outputs = OutputStream(sources, n=1)
    for source, numbers in zip(sources, ((10, 4, 3), (20, 16, 5)), strict=True):
        prompt, cached, made = numbers
        done = ChoiceDelta(0, "t", finish_reason="stop")
        source.feed(done, prompt_tokens=prompt, cached_tokens=cached, completion_tokens=made, finished=True)
    seen = [delta.index for batch in [b async for b in outputs] for delta in batch]
    assert sorted(seen) == [0, 1]
    assert outputs.usage() == {
        "prompt_tokens": 30,
        "completion_tokens": 8,
        "total_tokens": 38,
        "prompt_tokens_details": {"cached_tokens": 20, "pagetrie": {"pool": 20, "ram": 0, "disk": 0, "store": 0}},
    }
    await outputs.aclose()


@pytest.mark.parametrize(
    ("delta", "error", "kind"),
    [
        (ChoiceDelta(0, "end", finish_reason="error"), EngineError("boom"), EngineError),
        (ChoiceDelta(0, "end", finish_reason="error"), None, EngineError),
        (ChoiceDelta(0, "end", finish_reason="abort"), None, ServerStoppingError),
    ],
)
async def test_a_failure_comes_after_the_text_before_it(delta, error, kind):
    source = Fed()
    outputs = OutputStream([source], n=1)
    source.feed(delta, error=error, finished=True)
    batches = aiter(outputs)
    assert await anext(batches) == [ChoiceDelta(0, "end")]
    with pytest.raises(kind):
        await anext(batches)
    await outputs.aclose()


async def test_a_source_that_ends_early_is_a_failure():
    source = Fed()
    outputs = OutputStream([source], n=1)
    source.queue.put_nowait(None)
    with pytest.raises(EngineError):
        await anext(aiter(outputs))
    await outputs.aclose()


async def test_closing_at_once_closes_sources_that_never_ran():
    sources = [Fed(), Fed()]
    outputs = OutputStream(sources, n=1)
    await outputs.aclose()
    assert [source.closed for source in sources] == [1, 1]


async def test_a_timeout_comes_after_the_text_so_far():
    source = Fed()
    outputs = OutputStream([source], n=1)
    source.feed(ChoiceDelta(0, "a", [1]), completion_tokens=1)
    late = DeadlineExceededError(1.0, tokens=1)
    source.feed(ChoiceDelta(0, "b", finish_reason="timeout"), completion_tokens=1, finished=True, error=late)
    batches = aiter(outputs)
    assert await anext(batches) == [ChoiceDelta(0, "ab", [1])]
    with pytest.raises(DeadlineExceededError):
        await anext(batches)
    await outputs.aclose()
