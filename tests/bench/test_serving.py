"""The benchmark's rounds, with servers without a model and with peers that fail."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench.peers import PeerError
from bench.serving import Benchmark, measure, run_until_told
from bench.serving_client import Client
from bench.serving_systems import SYSTEMS, Launch, Options, Server, System, running
from bench.serving_workloads import WORKLOADS, Words, Workload
from tests.bench import fake_server
from tests.bench.words import WordTokenizer

WORDS = Words(WordTokenizer())
LOADS = [WORKLOADS["single"], WORKLOADS["unique"]]
OPTIONS = Options(Path("model.gguf"), threads=1)


def system(name: str, *flags: str, error: str | None = None) -> System:
    def version() -> str:
        if error is not None:
            raise PeerError(error)
        return "1.0"

    command = (sys.executable, fake_server.__file__, *flags)
    return System(name, "none", version, lambda options, workload: Launch(command, "model", "/health"))


def bench(
    tmp_path: Path, *systems: System, loads: list[Workload] = LOADS, say: Callable[[str], None] = print, **more: float
) -> Benchmark:
    return Benchmark(systems, loads, WORDS, OPTIONS, **{"cap_s": 60, **more}, say=say, logs=tmp_path)


def test_systems_take_turns_and_all_rounds_count(tmp_path: Path) -> None:
    lines: list[str] = []
    benchmark = bench(tmp_path, system("a"), system("b"), say=lines.append)
    asyncio.run(benchmark.run(2))
    assert [line.split(": ")[1].split()[0] for line in lines] == ["a", "a", "b", "b", "b", "b", "a", "a"]
    assert {key: len(cell.runs) for key, cell in benchmark.cells.items()} == {
        (name, load.name): 2 for name in "ab" for load in LOADS
    }
    run = benchmark.cells["b", "unique"].runs[0]
    assert (run.requests, run.completed, run.total_input_tokens, run.total_output_tokens) == (16, 16, 4000, 1024)
    assert run.cached_tokens == 4000 - 16
    assert run.peak_rss > 0
    assert benchmark.versions == {"a": "1.0", "b": "1.0"}


def test_a_peer_that_is_missing_or_fails_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    missing, failing = system("missing", error="not installed"), system("failing", "--fail")
    unstartable = replace(
        system("unstartable"), launch=lambda options, workload: Launch(("/nonexistent/server",), "m", "/health")
    )
    benchmark = bench(tmp_path, missing, failing, unstartable, system("good"))
    asyncio.run(benchmark.run(2))
    failures = {name: benchmark.cells[name, "single"].failure for name in ("missing", "failing", "unstartable")}
    assert failures["missing"] == "not installed"
    assert failures["failing"] == "failed: didn't start, ended with 1: no such model"
    assert str(failures["unstartable"]).startswith("failed: can't be started: ")
    assert len(benchmark.cells["good", "unique"].runs) == 2


def test_a_server_that_never_answers_fails_its_rows(tmp_path: Path) -> None:
    benchmark = bench(tmp_path, system("silent", "--hang"), cap_s=0.05)
    asyncio.run(benchmark.run(1))
    assert benchmark.cells["silent", "single"].failure == "failed: no answer to a request of 32 tokens within 0 s"


def test_nothing_begins_after_the_budget(tmp_path: Path) -> None:
    ticks = itertools.count()
    benchmark = bench(tmp_path, system("a"), budget_s=50)
    benchmark.clock = lambda: float(next(ticks))  # a run of `single` reads the clock well over 50 times
    asyncio.run(benchmark.run(2))
    assert len(benchmark.cells["a", "single"].runs) == 1
    assert benchmark.cells["a", "single"].failure is None
    assert benchmark.cells["a", "unique"].failure == "not run: the budget of 50 s was spent"


def test_a_run_over_its_time_is_stopped_with_what_it_has_and_not_tried_again(tmp_path: Path) -> None:
    async def run() -> bool:
        async with await asyncio.start_server(fake_server.handle, "127.0.0.1", 0) as server:
            client = Client("127.0.0.1", server.sockets[0].getsockname()[1], "m")

            async def script(ask: Callable[..., object]) -> None:
                await client.ask([4, 5], 3)
                await asyncio.Event().wait()  # for ever

            result = await measure(client, script, WORDS, 0.5, lambda: 7)
            assert (result.completed, result.total_output_tokens, result.peak_rss) == (1, 3, 7)
            benchmark = bench(tmp_path, system("a"), loads=LOADS[:1])
            benchmark.cells["a", "single"].runs.append(result)
            await benchmark.run(2)
            assert benchmark.cells["a", "single"].runs == [result]
            return result.stopped

    assert asyncio.run(run())


def test_a_stopped_server_is_gone(tmp_path: Path) -> None:
    async def run() -> int | None:
        launch = system("a").launch(OPTIONS, LOADS[0])
        async with running(launch, tmp_path / "log") as server:
            assert server.died() is None
        return server.process.poll()

    assert asyncio.run(run()) is not None


def test_termination_stops_the_server_and_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    @asynccontextmanager
    async def watched(launch: Launch, log: Path) -> AsyncIterator[Server]:
        async with running(launch, log) as server:
            started.append(server)
            yield server

    monkeypatch.setattr("bench.serving.running", watched)
    benchmark = bench(tmp_path, system("a"), say=lambda line: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run_until_told(benchmark, 2))
    assert [len(cell.runs) for cell in benchmark.cells.values()] == [1, 0]
    assert [server.process.poll() is not None for server in started] == [True]


def test_llama_gets_a_slot_per_request_in_flight_with_room_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.serving_systems.llama_server", lambda folder: tmp_path / "llama-server")
    command = SYSTEMS["llama.cpp"].launch(OPTIONS, WORKLOADS["fanout"]).command
    flags = dict(itertools.pairwise(command))
    assert flags["-np"] == "50"
    assert int(flags["-c"]) == 50 * 2304
    assert flags["-t"] == flags["-tb"] == "1"


def test_pagetrie_takes_more_flags_last() -> None:
    launch = SYSTEMS["pagetrie"].launch(replace(OPTIONS, pagetrie_args=["--weights", "fp32"]), LOADS[0])
    assert launch.command[-2:] == ("--weights", "fp32")
    assert launch.shown({sys.executable: "python"}).startswith("python -m pagetrie.cli serve model.gguf --threads 1 ")
