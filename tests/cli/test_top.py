"""``pagetrie top`` against a real server over the toy model: the numbers are the server's, and no more gets out."""

from __future__ import annotations

import io
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from pagetrie.cli.main import app
from pagetrie.cli.top import Top
from pagetrie.cli.top_sample import NoAnswerError, Server
from pagetrie.engine.loop import EngineLoop
from pagetrie.engine.observer import Observers
from pagetrie.engine.timeline import Timeline
from pagetrie.server.auth import KeyedAccess
from pagetrie.server.metrics import Metrics
from pagetrie.server.serve import HttpServer
from tests.e2e.test_tenants import Keys
from tests.engine.toy import World
from tests.server.conftest import Site
from tests.server.double import ByteTokenizer

TRUNK = "You are one of several agents who share a trunk of text. "


class Served:
    """A server on a socket with a tenant, an operator and a clock that moves a second with every look at it."""

    def __init__(self, folder: Path) -> None:
        keys = Keys(folder / "keys.json")
        self.acme, self.ops = keys.add("acme"), keys.add("ops", admin=True)
        timeline, metrics, seconds = Timeline(), Metrics("tiny", 300), itertools.count(1000.0)
        self.world = World(num_pages=100, max_model_len=300, observer=Observers([metrics, timeline]))
        site = Site(
            tokenizer=ByteTokenizer(add_bos=False),
            options={
                "loop": EngineLoop(self.world.engine),
                "metrics": metrics,
                "timeline": timeline,
                "access": KeyedAccess(keys.path, 100),
                "clock": lambda: next(seconds),
            },
        )
        site.app.state.live._interval = site.app.state.live._share = 0.0  # every look is a new frame
        ready = threading.Event()
        self.server = HttpServer(site.app, port=0, shutdown_timeout=5, on_ready=lambda url: ready.set())
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        assert ready.wait(30)
        self.url = self.server.url

    def complete(self, prompt: str, key: str, **fields: Any) -> Any:
        body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True, **fields}
        answer = httpx.post(
            f"{self.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60
        )
        return answer.raise_for_status().json()

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(30)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.stop()


class StopError(Exception):
    """In place of a person's Ctrl-C."""


def shown(served: Served, *steps: Any, terminal: bool = False) -> tuple[Top, io.StringIO]:
    """What watches it, and what it writes to; each of its pauses takes a step, the last one ends it."""
    output, coming = io.StringIO(), iter(steps)

    def pause(seconds: float) -> None:
        assert seconds == 2.0
        step = next(coming, None)
        if step is None:
            raise StopError
        step()

    console = Console(file=output, force_terminal=terminal, width=140, height=60, color_system=None)
    return Top(Server(served.url, served.ops), 2.0, console, pause), output


def test_once_shows_what_the_server_knows(served: Served) -> None:
    for number in range(3):
        served.complete(f"{TRUNK}{number}", served.acme)
    served.complete("\x1b[31mred\x07", served.ops)
    top, output = shown(served)
    top.once(as_json=False)
    text = output.getvalue()
    stats = served.world.cache.stats()
    assert f"free {stats.free_pages}" in text and f"cached {stats.cached_pages}" in text and "of 100 pages" in text
    assert "running 0" in text and "ended: 4 length" in text
    [acme] = [line.split("|") for line in text.splitlines() if line.startswith("|acme")][:1]
    cells = [cell.strip() for cell in acme[1:10]]
    assert cells[:2] == ["acme", "0"] and cells[3:] == ["0", "3", "0", "174", "114", "15"]
    shares = {share.owner: share.cached for share in served.world.cache.index.shares}
    assert int(cells[2]) in shares.values() and int(cells[2]) > 10
    assert "cmpl-4-0" in text and "not yours to read" in text
    # Text of users can't drive the terminal, and only the key's own tenant's is shown.
    assert "·[31mred·" in text and "\x1b" not in text and "\x07" not in text and "agents" not in text


def test_json_is_the_frame_and_more(served: Served) -> None:
    served.complete(TRUNK, served.acme)
    top, output = shown(served)
    top.once(as_json=True)
    told = json.loads(output.getvalue())
    assert told["pages"]["total"] == 100 and told["load"]["generated_tokens"] == 5 and told["rates"] == {}
    assert told["finished"]["length"] == 1 and told["tenants"]["acme"]["prompt_tokens"] == len(TRUNK)
    acme = told["tenants"]["acme"]
    assert (acme["active_pages"], acme["cached_pages"]) == (0, told["pages"]["cached"])
    assert told["totals"]["prompt_tokens"] == len(TRUNK) and told["totals"]["memory_bytes"] > 0


def test_lines_where_there_is_no_terminal(served: Served) -> None:
    def work() -> None:
        served.complete(f"{TRUNK}{len(served.world.runner.steps)}", served.acme)

    top, output = shown(served, work, work)
    with pytest.raises(StopError):
        top.lines(as_json=False)
    first, second, third = output.getvalue().splitlines()
    assert "prefill - tok/s decode - tok/s" in first and "hits - " in first
    assert "running 0 waiting 0 prefill" in second and "decode - tok/s" not in second
    assert "of 100 " in third and "ttft" in third
    top, output = shown(served, work)
    with pytest.raises(StopError):
        top.lines(as_json=True)
    rates = [json.loads(line)["rates"] for line in output.getvalue().splitlines()]
    assert rates[0] == {} and rates[1]["generated_tokens"] > 0


def test_a_screen_goes_on_while_the_server_is_away(served: Served) -> None:
    served.complete(TRUNK, served.acme)
    top, output = shown(served, served.stop, lambda: None, terminal=True)
    with pytest.raises(StopError):
        top.live()
    text = output.getvalue()
    assert f"▒ cached {served.world.cache.stats().cached_pages}" in text
    assert "no answer from http://127.0.0.1" in text and "cmpl-1-0" in text


def test_refusals_say_what_to_do(served: Served) -> None:
    with pytest.raises(NoAnswerError, match=r"refuses: .*--api-key or PAGETRIE_API_KEY"):
        Server(served.url).look()
    with pytest.raises(NoAnswerError, match="needs an admin key"):
        Server(served.url, served.acme).look()
    with pytest.raises(NoAnswerError, match="404; is this a pagetrie server"):
        Server(served.url + "/nowhere", served.ops).look()
    with pytest.raises(NoAnswerError, match="is no http"):
        Server("localhost:8000")
    with pytest.raises(NoAnswerError, match=r"no answer from http://127\.0\.0\.1:9"):
        Server("http://127.0.0.1:9").look()


def test_the_command(served: Served) -> None:
    done = CliRunner(env={"PAGETRIE_API_KEY": served.ops}).invoke(app, ["top", "--once", "--url", served.url])
    assert done.exit_code == 0, done.output
    assert "of 100 pages" in done.output
    done = CliRunner().invoke(app, ["top", "--once", "--json", "--url", served.url, "--api-key", served.ops])
    assert json.loads(done.output)["server"]["model"] == "tiny"
