"""Served end to end, against other servers: ``python -m bench serving --help``.

Systems take turns within each round, never two at once; one HTTP client sends all of them the same token ids. A system
that is missing, fails or takes too long is a row that says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.peers import ROOT, PeerError
from bench.serving_client import Client, RequestFailedError
from bench.serving_results import Cell, Run, as_json, insert, markdown, summarise
from bench.serving_systems import HOST, SYSTEMS, Launch, Options, Server, System, running
from bench.serving_workloads import WORKLOADS, Script, Words, Workload
from pagetrie.bundled import bundled_model_path
from pagetrie.models.loading import load_checkpoint

_WARM_UP = (32, 8)  # tokens in and out


@dataclass(slots=True)
class Benchmark:
    """All systems on all workloads.

    Attributes:
        cap_s: seconds that one run of a workload may take.
        budget_s: seconds after which no further run begins; None for no limit.
        say: told in one line what came out of each run.
        cells: filled as runs end; has an entry for every pair from the start.
    """

    systems: Sequence[System]
    workloads: Sequence[Workload]
    words: Words
    options: Options
    cap_s: float
    budget_s: float | None = None
    clock: Callable[[], float] = perf_counter
    say: Callable[[str], None] = print
    logs: Path = ROOT / "bench"
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    launches: dict[str, Launch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cells = {(system.name, load.name): Cell() for system in self.systems for load in self.workloads}
        for system in self.systems:
            try:
                self.versions[system.name] = system.version()
            except PeerError as error:
                self._fail(system, self.workloads, str(error))

    async def run(self, rounds: int) -> None:
        """Every system on every workload, ``rounds`` times; who begins changes with the round."""
        begin = self.clock()
        for number in range(rounds):
            turn = number % len(self.systems)
            for system in [*self.systems[turn:], *self.systems[:turn]]:
                await self._round(system, number, begin)

    async def _round(self, system: System, number: int, begin: float) -> None:
        """One system on the workloads it hasn't failed, restarted where a workload wants other flags."""
        server: Server | None = None
        launched: Launch | None = None
        async with AsyncExitStack() as stack:
            for workload in self.workloads:
                cell = self.cells[system.name, workload.name]
                # A workload that took too long once would again, and a failure isn't tried twice.
                if cell.failure is not None or any(run.stopped for run in cell.runs):
                    self.say(f"round {number + 1}: {system.name} {workload.name}: {cell.shown(workload.metric)}")
                    continue
                if self.budget_s is not None and self.clock() - begin > self.budget_s:
                    if not cell.runs:
                        cell.failure = f"not run: the budget of {self.budget_s:.0f} s was spent"
                    self.say(f"round {number + 1}: {system.name} {workload.name}: the budget is spent")
                    continue
                try:
                    launch = system.launch(self.options, workload)
                    if server is None or launch != launched or server.died() is not None:
                        await stack.aclose()
                        log = self.logs / f"{system.name}-{number + 1}-{workload.name}.log"
                        server = await stack.enter_async_context(running(launch, log))
                        launched = launch
                    self.launches.setdefault(system.name, launch)
                    run = await measure(
                        Client(HOST, server.port, launch.served, launch.extra, self.clock),
                        workload.prepare(self.words),
                        self.words,
                        self.cap_s,
                        server.peak_rss,
                    )
                    cell.runs.append(run)
                    if run.stopped:
                        server = None  # it may still compute what nobody waits for any more
                    shown = Cell([run]).shown(workload.metric)
                except (PeerError, RequestFailedError) as error:
                    end = server.died() if server is not None else None
                    shown = cell.failure = f"failed: {error}" + (f"; the server {end}" if end else "")
                    server = None
                self.say(f"round {number + 1}: {system.name} {workload.name}: {shown}")

    def _fail(self, system: System, workloads: Sequence[Workload], reason: str) -> None:
        for workload in workloads:
            self.cells[system.name, workload.name].failure = reason


async def measure(client: Client, script: Script, words: Words, cap_s: float, peak_rss: Callable[[], int]) -> Run:
    """Warm the server up with a request that shares nothing, then run the script against the clock.

    Raises:
        RequestFailedError: the first failed request of the script or the warm-up.
    """
    stopped = False
    try:
        async with asyncio.timeout(cap_s):
            await client.ask(words.draw(random.Random("warm-up"), _WARM_UP[0]), _WARM_UP[1])
    except TimeoutError:
        raise RequestFailedError(f"no answer to a request of {_WARM_UP[0]} tokens within {cap_s:.0f} s") from None
    client.replies.clear()
    begin, cpu = client.clock(), process_time()
    try:
        async with asyncio.timeout(cap_s):
            await script(client.ask)
    except TimeoutError:
        stopped = True
    except BaseExceptionGroup as group:
        raise _first(group) from None
    duration, used = client.clock() - begin, process_time() - cpu
    return summarise(client.replies, duration, used, peak_rss(), stopped=stopped)


def _first(group: BaseExceptionGroup) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def machine() -> str:
    """The processor, in words."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    pairs = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = pairs.get("flags", "").split()
    widest = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "")
    cores = f"{len(os.sched_getaffinity(0))} cores"
    return ", ".join(part for part in (pairs.get("model name", platform.machine()), cores, widest) if part)


def main(arguments: list[str]) -> int:
    """The command; 1 if nothing could be measured."""
    options = _parser().parse_args(arguments)
    model = options.model or bundled_model_path()
    console = Console()
    words = Words(load_checkpoint(model).tokenizer())
    chosen = Options(model, options.threads, shlex.split(options.pagetrie_args), options.vllm_dtype)
    workloads = [WORKLOADS[name] for name in options.workloads]
    bench = Benchmark(
        [SYSTEMS[name] for name in options.systems], workloads, words, chosen, options.cap_s, options.budget_s
    )

    def report() -> str:
        shorter = {f"{ROOT.parent}/": "", f"{model.parent}/": "", sys.executable: "python"}
        commands = {name: launch.shown(shorter) for name, launch in bench.launches.items()}
        if options.json:
            content = as_json(
                bench.cells, machine=machine(), versions=bench.versions, commands=commands, rounds=options.rounds
            )
            options.json.write_text(json.dumps(content, indent=1) + "\n")
        return markdown(bench.cells, options.systems, workloads, bench.versions, commands, machine(), options.rounds)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("runs", total=options.rounds * len(bench.cells))

        def say(line: str) -> None:
            progress.console.print(line, highlight=False, markup=False)
            progress.advance(task)
            report()  # what is there already outlives an interrupted run

        bench.say = say
        try:
            asyncio.run(run_until_told(bench, options.rounds))
        except (KeyboardInterrupt, asyncio.CancelledError):
            console.print("interrupted; the tables hold what was measured until then")
    tables = report()
    if options.markdown:
        page = options.markdown.read_text() if options.markdown.exists() else ""
        options.markdown.write_text(insert(page, tables))
    print(tables)
    return int(not any(cell.runs for cell in bench.cells.values()))


async def run_until_told(bench: Benchmark, rounds: int) -> None:
    """Being terminated is like Ctrl-C: the running server is stopped, and what was measured is kept."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await bench.run(rounds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench serving", description=(__doc__ or "").split(":")[0])
    names: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--systems", choices=list(SYSTEMS), default=list(SYSTEMS), help=", ".join(SYSTEMS), **names)
    parser.add_argument(
        "--workloads", choices=list(WORKLOADS), default=list(WORKLOADS), help=", ".join(WORKLOADS), **names
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each system runs each workload [3]")
    parser.add_argument("--cap-s", type=float, default=180, help="seconds until a run of a workload is stopped [180]")
    parser.add_argument("--budget-s", type=float, help="seconds until no further run begins [no limit]")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help=f"threads for each system [{cores}]")
    parser.add_argument("--model", type=Path, help="a GGUF file [the bundled model]")
    parser.add_argument("--vllm-dtype", choices=["float32", "bfloat16"], default="float32", help="[float32]")
    parser.add_argument("--pagetrie-args", default="", metavar="ARGS", help='more flags for pagetrie: "--weights fp32"')
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run's figures")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the tables, between their markers if it has them"
    )
    return parser
