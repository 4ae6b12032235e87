"""The engine's thread and its asyncio side, over the toy model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pagetrie.engine.loop import EngineLoop, RequestStream
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.errors import EngineError, InvalidRequestError, QueueFullError
from tests.engine.test_engine import prompt
from tests.engine.toy import Collected, World, expected


@asynccontextmanager
async def running(world: World) -> AsyncIterator[EngineLoop]:
    loop = EngineLoop(world.engine)
    loop.start()
    try:
        yield loop
    finally:
        await loop.stop()
        assert not loop.is_alive()


def request(name: str, seed: int, length: int = 10, **params: object) -> Request:
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params}
    return Request(name, prompt(seed, length), SamplingParams(**params))  # type: ignore[arg-type]


async def collect(stream: RequestStream, pauses: int = 0) -> Collected:
    seen = Collected()
    async for output in stream:
        seen.add(output)
        for _ in range(pauses):
            await asyncio.sleep(0)
    return seen


def test_eight_readers_at_their_own_pace_get_everything_in_order() -> None:
    """Pain B9."""

    async def main() -> None:
        world = World(num_pages=40)
        async with running(world) as loop:
            streams = [await loop.submit(request(str(i), i)) for i in range(8)]
            seen = await asyncio.gather(*(collect(stream, i * 7) for i, stream in enumerate(streams)))
        for i, one in enumerate(seen):
            assert one.tokens[0] == expected(prompt(i, 10), 12, eos=False)
            assert one.last is not None and one.last.finished

    asyncio.run(main())


def test_closing_a_stream_frees_its_pages_whether_read_or_not() -> None:
    async def main() -> None:
        world = World(num_pages=64)
        async with running(world) as loop:
            unread = await loop.submit(request("unread", 1, max_tokens=150))
            read = await loop.submit(request("read", 2, max_tokens=150))
            await anext(read)
            await unread.aclose()
            await read.aclose()
            await read.aclose()
            other = await collect(await loop.submit(request("other", 3)))
            assert other.reasons[0] == "length"
            await loop.reset_prefix_cache()
            assert (loop.snapshot().running, loop.snapshot().waiting) == (0, 0)
            assert loop.snapshot().active_pages == 0
            assert [item async for item in read] == []

    asyncio.run(main())


def test_refusals_come_before_any_output() -> None:
    async def main() -> None:
        world = World(seats=1, queue=2)
        async with running(world) as loop:
            with pytest.raises(InvalidRequestError, match="empty"):
                await loop.submit(Request("x", [], SamplingParams()))
            first = await loop.submit(request("a", 1, max_tokens=150))
            with pytest.raises(InvalidRequestError, match="in use"):
                await loop.submit(request("a", 1))
            await anext(first)
            rest = []

            async def fill() -> None:
                for name in range(10):
                    rest.append(await loop.submit(request(str(name), 1)))  # noqa: PERF401

            with pytest.raises(QueueFullError):
                await fill()
            assert len(rest) >= 2

    asyncio.run(main())


def test_stop_drains_then_aborts_and_refuses_new_work() -> None:
    async def main() -> None:
        world = World(num_pages=64)
        loop = EngineLoop(world.engine)
        loop.start()
        ends = await loop.submit(request("ends", 1, max_tokens=5))
        reader = asyncio.create_task(collect(ends))
        await loop.stop(drain_seconds=60)
        assert (await reader).tokens[0] == expected(prompt(1, 10), 5, eos=False)
        with pytest.raises(EngineError, match="shutting down"):
            await loop.submit(request("late", 2))

        world = World(num_pages=64, max_model_len=200)
        loop = EngineLoop(world.engine)
        loop.start()
        long = await loop.submit(request("long", 1, max_tokens=150))
        await anext(long)
        reader = asyncio.create_task(collect(long))
        await loop.stop(drain_seconds=0)
        seen = await reader
        assert seen.reasons[0] in ("abort", "length")
        assert world.idle_pages() == 0

    asyncio.run(main())


def test_a_fault_in_the_step_ends_requests_not_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        world = World()
        async with running(world) as loop:
            scheduler = world.engine._scheduler
            real = scheduler.schedule

            def broken() -> object:
                monkeypatch.setattr(scheduler, "schedule", real)
                raise AssertionError("planted")

            monkeypatch.setattr(scheduler, "schedule", broken)
            seen = await collect(await loop.submit(request("a", 1)))
            assert seen.last is not None and isinstance(seen.last.error, EngineError)
            again = await collect(await loop.submit(request("b", 1)))
            assert again.tokens[0] == expected(prompt(1, 10), 12, eos=False)

    asyncio.run(main())
