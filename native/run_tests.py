"""Runs the tests of the native extension over a build of it that is only for tests.

    python native/run_tests.py avx512 [pytest arguments]
    python native/run_tests.py sanitized [pytest arguments]

``avx512`` is the usual build but for the AVX-512 kernels, whose instructions are done with AVX2 (``native/emulated``):
any machine with AVX2 tests them. The emulation itself is checked first. ``sanitized`` adds AddressSanitizer and
UndefinedBehaviorSanitizer.

Builds into build/NAME (kept, so only changes are compiled again). Exits with pytest's status, or with that of a
sanitizer or a check on its first finding.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = {
    "avx512": ["-DPAGETRIE_EMULATE_AVX512=ON"],
    "sanitized": ["-DPAGETRIE_EMULATE_AVX512=ON", "-DPAGETRIE_SANITIZE=ON"],
}
MARK = "PAGETRIE_SANITIZED_RUN"


def build(name: str) -> Path:
    """Configure, compile and check; the folder of the build."""
    folder = ROOT / "build" / name
    tools = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    configure = ["cmake", "-S", str(ROOT / "native"), "-B", str(folder), "-G", "Ninja", *OPTIONS[name]]
    subprocess.run([*configure, f"-DPython_EXECUTABLE={sys.executable}"], check=True, env=environment)
    subprocess.run(["cmake", "--build", str(folder)], check=True, env=environment)
    for check in ("check_emulated", "check_instructions"):  # not there where the processor is of another family
        if (folder / check).exists():
            subprocess.run([folder / check], check=True)
    return folder


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


def run(folder: Path, arguments: list[str]) -> int:
    """Put the build in the place of the installed extension, then run the tests."""
    import pytest
    import torch  # noqa: F401  (before the extension, so that both use one OpenMP runtime)

    import pagetrie

    (extension,) = folder.glob("_native*.so")
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
    if len(sys.argv) < 2 or sys.argv[1] not in OPTIONS:
        sys.exit(f"usage: python {sys.argv[0]} {{{','.join(OPTIONS)}}} [pytest arguments]")
    name, *arguments = sys.argv[1:]
    if MARK not in os.environ:
        folder = build(name)
        if name == "sanitized":
            restart_with_runtime(sys.argv[1:])
    sys.exit(run(ROOT / "build" / name, arguments))
