"""A Valkey or Redis of the test's own."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import redis


class Valkey:
    """A server process on a free port, keeping nothing on disk. Skips the test where neither program is installed."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("valkey-server") or shutil.which("redis-server")
        if program is None:
            pytest.skip("neither valkey-server nor redis-server is installed (Debian: apt-get install valkey-server)")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self.client = redis.Redis.from_url(self.url)
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        for _ in range(1000):
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                if self._process.poll() is not None:
                    raise
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.01)
        raise AssertionError("the store didn't start")

    def freeze(self) -> None:
        """Answer nothing any more, and keep connections open."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
