"""Runs the tests of the native extension over a build with AddressSanitizer and UndefinedBehaviorSanitizer.

    python native/run_sanitized.py [pytest arguments]

Builds into build/sanitized (kept, so only changes are compiled again). Exits with pytest's status, or with the
sanitizer's on its first finding.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "sanitized"
MARK = "PAGETRIE_SANITIZED_RUN"


def build() -> None:
    """Configure and compile."""
    tools = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    configure = ["cmake", "-S", str(ROOT / "native"), "-B", str(BUILD), "-G", "Ninja", "-DPAGETRIE_SANITIZE=ON"]
    subprocess.run([*configure, f"-DPython_EXECUTABLE={sys.executable}"], check=True, env=environment)
    subprocess.run(["cmake", "--build", str(BUILD)], check=True, env=environment)


def restart_with_runtime(arguments: list[str]) -> None:
    """Run this again with the sanitizers' runtime loaded first, as it must be in a program not built with it."""
    environment = os.environ | {
        MARK: "1",
        # It looks for the C++ library's throw as it starts, so that has to be there too.
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so.6')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps much until it ends
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    os.execve(sys.executable, [sys.executable, __file__, *arguments], environment)


def library(name: str) -> str:
    """Where the compiler keeps a library."""
    command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(arguments: list[str]) -> int:
    """Put the build in the place of the installed extension, then run the tests."""
    import pytest
    import torch  # noqa: F401  (before the extension, so that both use one OpenMP runtime)

    import pagetrie

    (extension,) = BUILD.glob("_native*.so")
    spec = importlib.util.spec_from_file_location("pagetrie._native", extension)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pagetrie._native"] = module
    spec.loader.exec_module(module)
    pagetrie._native = module  # type: ignore[attr-defined]
    os.chdir(ROOT)
    # Capturing file descriptors would swallow what a sanitizer says before it ends the process.
    return pytest.main(["-p", "no:cacheprovider", "--timeout=0", "--capture=sys", *(arguments or ["tests/native"])])


if __name__ == "__main__":
    if MARK not in os.environ:
        build()
        restart_with_runtime(sys.argv[1:])
    sys.exit(run(sys.argv[1:]))
