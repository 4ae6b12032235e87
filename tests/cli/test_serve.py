"""``pagetrie serve`` as a process: what it prints, how it stops, how it fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

import pagetrie
from tests.budget import first

START = re.compile(
    r"pagetrie serves (?P<name>\S+) at (?P<url>http://127\.0\.0\.1:\d+) "
    r"\(pool: (?P<pages>\d+) pages of 16 tokens = (?P<tokens>[\d,]+) tokens, .* (KiB|MiB|GiB); context: \d+ tokens\)\n"
)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pagetrie.cli", "serve", "--threads", "1", *arguments]


def _environment() -> dict[str, str]:
    needed = ("PAGETRIE_CACHE_DIR", "PAGETRIE_NO_DISK_CACHE")
    kept = {k: v for k, v in os.environ.items() if k in needed or not k.upper().startswith("PAGETRIE_")}
    return kept | {"PYTHONPATH": str(Path(pagetrie.__file__).parents[1])}


@contextmanager
def _serving(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], re.Match[str]]]:
    """A server on a free port and its parsed start line; killed at the end if the test didn't stop it."""
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            _command("--port", "0", *arguments),
            cwd=folder,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = START.fullmatch(line)
        assert match is not None, (line, (folder / "stderr").read_text())
        yield process, match
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()


@pytest.mark.parametrize("stop", first(1, [signal.SIGINT, signal.SIGTERM]))
def test_it_says_where_it_serves_answers_and_stops_cleanly(
    bundled_model: Path, tmp_path: Path, stop: signal.Signals
) -> None:
    (tmp_path / "pagetrie.toml").write_text("num_pages = 40\n")
    logging = ("--access-log", "json", "--log-level", "error")
    with _serving(tmp_path, str(bundled_model), "--served-model-name", "small", *logging) as (process, start):
        assert (start["name"], start["pages"], start["tokens"]) == ("small", "40", "640")
        body = json.dumps({"model": "small", "prompt": "1, 2, 3,", "max_tokens": 3, "temperature": 0}).encode()
        request = Request(f"{start['url']}/v1/completions", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["text"] == " 4,"
        process.send_signal(stop)
        assert process.wait(60) == 0
        assert process.stdout is not None
        [logged] = map(json.loads, process.stdout)
    assert (logged["status"], logged["completion_tokens"]) == (200, 3)
    assert (tmp_path / "stderr").read_text() == ""
