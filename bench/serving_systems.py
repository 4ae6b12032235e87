"""How each system is started for ``python -m bench serving``, and a running server as a context."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.peers import PEERS, ROOT, PeerError, installed_version, llama_server
from bench.serving_client import answers
from bench.serving_workloads import Workload

HOST = "127.0.0.1"
KV_GIB = 2
_START_S, _STOP_S, _POLL_S = 600, 20, 0.2  # vLLM compiles its kernels when it first starts


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose for all systems."""

    model: Path
    threads: int
    pagetrie_args: Sequence[str] = ()
    vllm_dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Launch:
    """One way to start a server. Equal launches can serve one after another workload without a restart.

    Attributes:
        command: without the port.
        port_flag: what comes before the port at the end of the command.
        served: the model's name in requests.
        ready: the path that answers 200 once requests are taken.
        environment: added to this process's own.
        extra: fields for every request's body.
    """

    command: tuple[str, ...]
    served: str
    ready: str
    port_flag: str = "--port"
    environment: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def shown(self, replaced: Mapping[str, str]) -> str:
        """The command for people: program and flags, paths of this machine shortened."""
        text = shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), *self.command])
        for path, name in replaced.items():
            text = text.replace(path, name)
        return text


@dataclass(frozen=True, slots=True)
class System:
    """A server that can be measured.

    Attributes:
        version: raises PeerError if the system isn't there.
        launch: how to start it for a workload; may prepare files first. Raises PeerError.
    """

    name: str
    weights: str
    version: Callable[[], str]
    launch: Callable[[Options, Workload], Launch]


def _pagetrie(options: Options, workload: Workload) -> Launch:  # noqa: ARG001
    flags = (
        "--threads",
        str(options.threads),
        "--kv-memory",
        f"{KV_GIB}GiB",
        "--log-level",
        "warning",
        "--no-disk-cache",
    )
    command = (sys.executable, "-m", "pagetrie.cli", "serve", str(options.model), *flags, *options.pagetrie_args)
    return Launch(command, options.model.stem, "/v1/models")


def _llama(options: Options, workload: Workload) -> Launch:
    threads, slots = str(options.threads), workload.at_a_time
    # A slot per request in flight, each with room for the workload's longest sequence (steps of 256 as the server has).
    context = slots * -(-(workload.longest + 8) // 256) * 256
    flags = ("-m", str(options.model), "-t", threads, "-tb", threads, "-np", str(slots), "-c", str(context))
    program = str(llama_server(PEERS["llama.cpp"].folder))
    more = ("--host", HOST, "--no-webui")
    return Launch((program, *flags, *more), "model", "/health", extra={"cache_prompt": True})


def _openvino(options: Options, workload: Workload) -> Launch:  # noqa: ARG001
    script = str(Path(__file__).with_name("openvino_adapter.py"))
    flags = ("--model", str(options.model), "--threads", str(options.threads), "--cache-gib", str(KV_GIB))
    return Launch((str(PEERS["openvino"].python), script, *flags), "model", "/v1/models")


def _vllm(options: Options, workload: Workload) -> Launch:  # noqa: ARG001
    folder = hf_folder(options.model, options.vllm_dtype)
    flags = ("--dtype", options.vllm_dtype, "--max-model-len", "4096", "--enable-prefix-caching", "--host", HOST)
    shown = ("--served-model-name", "model", "--enable-prompt-tokens-details")
    command = (str(PEERS["vllm"].folder / "bin" / "vllm"), "serve", str(folder))
    environment = {
        # vLLM's own advice for CPUs; the package brings the library.
        "LD_PRELOAD": str(PEERS["vllm"].folder / "lib" / "libiomp5.so"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(options.threads),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Launch((*command, *flags, *shown), "model", "/health", environment=environment)


SYSTEMS = {
    system.name: system
    for system in (
        System("pagetrie", "the GGUF file's", lambda: version("pagetrie"), _pagetrie),
        System("llama.cpp", "the GGUF file's", lambda: installed_version(PEERS["llama.cpp"]), _llama),
        System("openvino", "the GGUF file's", lambda: installed_version(PEERS["openvino"]), _openvino),
        System("vllm", "dequantised", lambda: installed_version(PEERS["vllm"]), _vllm),
    )
}


def hf_folder(model: Path, dtype: str) -> Path:
    """The model as a Hugging Face folder under .cache/, exported if it isn't there. Raises PeerError."""
    folder = ROOT / "models" / f"{model.stem}-{dtype}"
    if not (folder / "config.json").exists():
        command = [sys.executable, "-m", "bench.peers_export", str(folder), "--model", str(model), "--dtype", dtype]
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT.parent)
        if result.returncode != 0:
            raise PeerError(f"export failed: {result.stderr.strip().splitlines()[-1]}")
    return folder


class Server:
    """A started server. ``peak_rss`` counts all its processes."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self._log = log

    def died(self) -> str | None:
        """How the server ended, with its last words, or None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"ended with {code}: {lines[-1].strip()[:200] if lines else 'no output'}"

    def peak_rss(self) -> int:
        """Bytes: the peaks of its processes, added up (pages that they share count in each)."""
        total = 0
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                if os.getsid(int(status.parent.name)) == self.process.pid:
                    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
                    total += int(line.split()[1]) * 1024
        return total


@asynccontextmanager
async def running(launch: Launch, log: Path) -> AsyncIterator[Server]:
    """Start a server, wait until it takes requests, stop it and all its processes in the end.

    Raises:
        PeerError: it ended or took too long to start.
    """
    port = free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **launch.environment}
    command = [*launch.command, launch.port_flag, str(port)]
    with log.open("wb") as output:
        try:
            # A session of its own, so that all its processes can be found and stopped.
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        except OSError as error:
            raise PeerError(f"can't be started: {error}") from error
    server = Server(process, port, log)
    try:
        await _ready(server, launch.ready)
        yield server
    finally:
        await _stop(process)


async def _ready(server: Server, path: str) -> None:
    try:
        async with asyncio.timeout(_START_S):
            while not await answers(HOST, server.port, path):
                if end := server.died():
                    raise PeerError(f"didn't start, {end}")
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise PeerError(f"took no requests within {_START_S} s of its start") from None


async def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(process.wait, _STOP_S)
    # What is left of the group, children that ignore the signal too.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.to_thread(process.wait)


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
