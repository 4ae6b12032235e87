"""What an open dashboard costs the server: ``python -m bench live [--model-ms MS]``.

The real engine, its thread, the HTTP server and 256 running sequences over a runner that only hands out tokens, after
the time that a model would take (during which it holds the interpreter no more than a model does). Prompts share half
of their 512 tokens; outputs of 128 to 384 tokens end and others begin, so the tree holds what has ended. In pairs of
windows, in turn, a viewer in another process reads the live events or doesn't; tokens handed out are compared.

Snapshots are taken more often than a server takes them, so that what they cost stands out of the noise; the loss is
then scaled to the server's pace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median

import httpx

from bench.scheduler import NoModel
from pagetrie.bundled import bundled_model_path
from pagetrie.engine.config import EngineConfig
from pagetrie.engine.engine import Engine
from pagetrie.engine.loop import EngineLoop
from pagetrie.engine.observer import EngineObserver, Observers, StepReport
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.engine.runner import SequenceResult, StepPlan
from pagetrie.engine.timeline import Timeline
from pagetrie.kv import CacheManager, EvictionLog
from pagetrie.models.loading import load_checkpoint
from pagetrie.server.app import create_app
from pagetrie.server.live import INTERVAL, SHARE
from pagetrie.server.metrics import Metrics
from pagetrie.server.serve import HttpServer
from pagetrie.text.tokenizer import Tokenizer

RUNNING, PROMPT, SHARED, OUTPUT = 256, 512, 256, (128, 384)
PAGES, PAGE_SIZE = 32_768, 16
WARM_UP, EVERY = 5.0, 0.5
VIEWER = """
import sys, httpx
with httpx.stream("GET", sys.argv[1] + "/v1/admin/live/events", timeout=60) as response:
    for chunk in response.iter_raw():
        pass
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """One run.

    Attributes:
        model_ms: what a step of the model took.
        tokens_per_second: nobody looking; the median window.
        interval: seconds between snapshots here.
        lost: share of it that is lost then, the median over pairs of windows.
        lost_middle: what the middle half of the pairs lost.
        pace: seconds between snapshots of a server, by its own rule.
        lost_at_pace: share that is lost then.
        build_ms: CPU time of a snapshot on the engine's thread, median.
        cost_ms: the same with that of writing it as JSON on another thread.
        frame_bytes: one frame's size.
        edges: edges of the tree.
    """

    model_ms: float
    tokens_per_second: float
    interval: float
    lost: float
    lost_middle: tuple[float, float]
    pace: float
    lost_at_pace: float
    build_ms: float
    cost_ms: float
    frame_bytes: int
    edges: int


class Steps(EngineObserver):
    """When steps ended, and how many tokens had been handed out then."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int]] = []
        self._tokens = 0

    def on_step(self, report: StepReport) -> None:
        self._tokens += report.generated_tokens
        self._ends.append((report.time, self._tokens))

    def rate(self, begin: float) -> float:
        """Tokens a second over the whole steps since a time."""
        ends = [end for end in self._ends if end[0] >= begin]
        return (ends[-1][1] - ends[0][1]) / (ends[-1][0] - ends[0][0])


class SlowModel(NoModel):
    """Takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def execute(self, plan: StepPlan) -> list[SequenceResult]:
        if self._seconds:
            time.sleep(self._seconds)
        return super().execute(plan)


async def measure(model_ms: float, *, pairs: int, seconds: float) -> Cost:
    """Compare ``pairs`` pairs of windows of so many seconds."""
    tokenizer: Tokenizer = load_checkpoint(bundled_model_path()).tokenizer()
    timeline, metrics, steps = Timeline(), Metrics("none"), Steps()
    engine = Engine(
        runner=SlowModel(model_ms / 1e3),
        cache=CacheManager(num_pages=PAGES, page_size=PAGE_SIZE, evictions=EvictionLog(time.monotonic)),
        vocabulary=tokenizer,
        config=EngineConfig(max_model_len=8192, max_num_seqs=RUNNING, max_num_batched_tokens=8192),
        clock=time.monotonic,
        rng=random.Random(0),
        observer=Observers([metrics, timeline, steps]),
    )
    loop = EngineLoop(engine)
    app = create_app(
        loop=loop,
        tokenizer=tokenizer,
        chat_template=None,
        model_name="none",
        max_model_len=8192,
        metrics=metrics,
        timeline=timeline,
    )
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = HttpServer(app, port=0, shutdown_timeout=0, on_ready=ready.set_result)
    serving = asyncio.ensure_future(server.serve())
    url = await ready
    rng = random.Random(0)
    shared = [rng.randrange(1000, 40_000) for _ in range(SHARED)]

    async def client(number: int) -> None:
        for turn in range(1_000_000):
            prompt = shared + [rng.randrange(1000, 40_000) for _ in range(PROMPT - SHARED)]
            params = SamplingParams(max_tokens=rng.randint(*OUTPUT), temperature=0.0)
            async for _ in await loop.submit(Request(f"{number}-{turn}", prompt, params)):
                pass

    clients = [asyncio.ensure_future(client(number)) for number in range(RUNNING)]
    await asyncio.sleep(WARM_UP)
    feed, rates, costs, intervals = app.state.live, ([], []), [], []
    feed._interval, feed._share = EVERY, 0
    for pair in range(pairs):
        for watched in (False, True) if pair % 2 else (True, False):
            viewer = subprocess.Popen([sys.executable, "-c", VIEWER, url]) if watched else None
            seen = feed.snapshots
            while watched and feed.snapshots == seen:
                await asyncio.sleep(0.001)
            begin, taken = time.monotonic(), feed.snapshots
            await asyncio.sleep(seconds)
            seen = feed.snapshots
            while watched and feed.snapshots == seen:  # whole intervals, so that it holds its share of snapshots
                await asyncio.sleep(0.001)
            rates[watched].append(steps.rate(begin))
            if watched:
                intervals.append((time.monotonic() - begin) / (feed.snapshots - taken))
                await asyncio.sleep(0.5)  # until the last one is written
            if viewer is not None:
                costs.append((feed._snapshot.build_seconds, feed._cost))
                viewer.kill()
                viewer.wait()
    async with httpx.AsyncClient() as http:
        frame = (await http.get(f"{url}/v1/admin/live", timeout=60)).content
    for task in clients:
        task.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    server.stop()
    await serving
    losses = sorted(1 - with_page / without for without, with_page in zip(*rates, strict=True))
    build, cost = (median(times) for times in zip(*costs, strict=True))
    pace = max(INTERVAL, SHARE * cost)
    return Cost(
        model_ms=model_ms,
        tokens_per_second=median(rates[False]),
        interval=median(intervals),
        lost=median(losses),
        lost_middle=(losses[len(losses) // 4], losses[-1 - len(losses) // 4]),
        pace=pace,
        lost_at_pace=median(losses) * median(intervals) / pace,
        build_ms=build * 1e3,
        cost_ms=cost * 1e3,
        frame_bytes=len(frame),
        edges=json.loads(frame)["tree"]["all"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench live", description=__doc__)
    parser.add_argument("--model-ms", type=float, default=200.0, help="what a step of the model takes (default 200)")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of windows (default 6)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a window, at least (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a line")
    options = parser.parse_args()
    cost = asyncio.run(measure(options.model_ms, pairs=options.pairs, seconds=options.seconds))
    if options.json:
        print(json.dumps(asdict(cost), indent=2))
        return
    low, high = cost.lost_middle
    print(f"{RUNNING} sequences, {cost.model_ms:g} ms of model a step, nobody looking: {cost.tokens_per_second:,.0f}/s")
    print(
        f"With a snapshot every {cost.interval:.2f} s {cost.lost:.2%} less (middle half: {low:.2%} to {high:.2%}); so"
    )
    print(f"with one every {cost.pace:.1f} s, a server's pace, {cost.lost_at_pace:.2%} less")
    print(
        f"A snapshot takes {cost.build_ms:.1f} ms of the engine's thread, with its JSON {cost.cost_ms:.1f} of CPU time"
    )
    print(f"A frame has {cost.frame_bytes:,} bytes, the tree {cost.edges:,} edges")


if __name__ == "__main__":
    main()
