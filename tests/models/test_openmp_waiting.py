"""torch's idle threads must not spin for long: the setting has to be there before torch is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MODULES = ["pagetrie.assembly", "pagetrie.runner", "pagetrie.runner.storage", "pagetrie.models.decoder"]


@pytest.mark.parametrize("module", MODULES)
def test_spinning_is_bounded_before_torch_is_imported(module: str) -> None:
    code = f"""
import builtins, os, sys
real = builtins.__import__
def watch(name, *rest):
    if name.split(".")[0] == "torch" and "torch" not in sys.modules:
        print(os.environ.get("GOMP_SPINCOUNT"))
        sys.exit()
    return real(name, *rest)
builtins.__import__ = watch
import {module}
"""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "1000"
