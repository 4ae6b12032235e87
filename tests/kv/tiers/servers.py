"""Stores of the test's own: a Valkey or Redis, an S3 server, a Mooncake master."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import redis


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _until(process: subprocess.Popen[bytes], answers: Callable[[], bool]) -> None:
    """Wait for a server that was started."""
    for _ in range(1000):
        if answers():
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.02)
            break
    process.kill()
    raise AssertionError(f"the store didn't start: {process.args!r}")


class Valkey:
    """A server process on a free port, keeping nothing on disk. Skips the test where neither program is installed."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("valkey-server") or shutil.which("redis-server")
        if program is None:
            pytest.skip("neither valkey-server nor redis-server is installed (Debian: apt-get install valkey-server)")
        self.port = _free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self.client = redis.Redis.from_url(self.url)
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        _until(self._process, self._answers)

    def _answers(self) -> bool:
        with contextlib.suppress(redis.ConnectionError):
            return bool(self.client.ping())
        return False

    def freeze(self) -> None:
        """Answer nothing any more, and keep connections open."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class S3:
    """moto's S3 in memory, with one bucket. Skips the test where it isn't installed."""

    def __init__(self, environment: pytest.MonkeyPatch) -> None:
        program = shutil.which("moto_server")
        if program is None:
            pytest.skip("moto_server isn't installed (pip install 'moto[server]')")
        port = _free_port()
        endpoint = f"http://127.0.0.1:{port}"
        command = [program, "-p", str(port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _until(self._process, lambda: _makes(f"{endpoint}/pages"))
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }.items():
            environment.setenv(name, value)
        self.url = "s3://pages/some/prefix"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _makes(bucket: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.put(bucket).is_success
    return False


class Mooncake:
    """A Mooncake master. Skips the test where the package, or a library of the system that it needs, is missing."""

    def __init__(self) -> None:
        package = importlib.util.find_spec("mooncake")
        if package is None:
            pytest.skip("mooncake-transfer-engine-non-cuda isn't installed")
        try:
            importlib.import_module("mooncake.store")
        except ImportError as error:
            pytest.skip(f"Mooncake misses a library of the system (Debian: apt-get install libibverbs1): {error}")
        (folder,) = package.submodule_search_locations or ()
        port, metrics = _free_port(), _free_port()
        command = [f"{folder}/mooncake_master", f"--rpc_port={port}", f"--metrics_port={metrics}"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _until(self._process, lambda: _listens(port))
        self.url = f"mooncake://127.0.0.1:{port}?host=127.0.0.1&segment={64 << 20}&buffer={32 << 20}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False
