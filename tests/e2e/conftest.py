"""Real servers: the ``pagetrie serve`` command in a process of its own, the bundled model, loopback."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

BIG_CONTEXT = 1152
READY = re.compile(r"pagetrie serves (\S+) at (http://\S+)")


class Server:
    """A running ``pagetrie serve``, and clients for it."""

    def __init__(self, *options: str, cwd: Path) -> None:
        command = [str(Path(sys.executable).parent / "pagetrie"), "serve", "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd)
        self.log: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if ready := READY.search(line):
                self.model, self.url = ready[1], ready[2]
                break
        else:
            raise AssertionError("the server didn't start:\n" + "".join(self.log))
        self.reader = threading.Thread(target=lambda: self.log.extend(self.process.stdout or ()), daemon=True)
        self.reader.start()
        self.http = httpx.Client(base_url=self.url, timeout=300)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)

    def metrics(self) -> dict[str, float]:
        """Metrics without labels but ``state``/``finished_reason``/..., summed over the rest."""
        values: dict[str, float] = {}
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith("#"):
                continue
            name, _, value = line.rpartition(" ")
            name = re.sub(r'(model_name|engine)="[^"]*",?', "", name).replace(",}", "}").replace("{}", "")
            values[name] = values.get(name, 0.0) + float(value)
        return values

    def wait_until(self, what: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Ask for the metrics until they are as they should become. Bounded by the number of questions."""
        for _ in range(3000):
            values = self.metrics()
            if what(values):
                return values
        raise AssertionError(f"never came true; last: {values}")

    def idle(self) -> dict[str, float]:
        """Wait until nothing runs or waits and every page is back; return the metrics."""
        return self.wait_until(
            lambda m: (
                m["vllm:num_requests_running"] == m["vllm:num_requests_waiting"] == 0
                and m['pagetrie:pages{state="active"}'] == 0
            )
        )

    def complete(self, prompt: object, **fields: object) -> dict[str, object]:
        """POST /v1/completions, greedy unless told otherwise."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, **fields}
        response = self.http.post("/v1/completions", json=body)
        response.raise_for_status()
        return response.json()  # type: ignore[no-any-return]

    def reset(self) -> None:
        self.http.post("/reset_prefix_cache").raise_for_status()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def _starter(temporary: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Start servers with given options; all are stopped at the end, and must end well."""
    servers: list[Server] = []

    def start(*options: str) -> Server:
        servers.append(Server(*options, cwd=temporary.mktemp("server")))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            assert server.stop() == 0, "".join(server.log)


@pytest.fixture
def start_server(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """For servers of one test."""
    yield from _starter(tmp_path_factory)


@pytest.fixture(scope="session")
def start_lasting(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """For servers that many tests share."""
    yield from _starter(tmp_path_factory)


@pytest.fixture(scope="session")
def big(start_lasting: Callable[..., Server]) -> Server:
    """Room for everything: 8,000 tokens."""
    return start_lasting("--num-pages", "500", "--max-model-len", str(BIG_CONTEXT))


@pytest.fixture(scope="session")
def small(start_lasting: Callable[..., Server]) -> Server:
    """A pool of 512 tokens, for a model of 8,192."""
    return start_lasting("--num-pages", "32")


@pytest.fixture(scope="session")
def narrow(start_lasting: Callable[..., Server]) -> Server:
    """Four seats and small steps."""
    return start_lasting("--num-pages", "300", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
