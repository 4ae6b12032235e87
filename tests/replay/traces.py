"""Where the published traces lie, if they do."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from pagetrie.replay.trace import Trace, read_trace

FOLDER = Path(os.environ.get("PAGETRIE_TRACES") or Path(__file__).parents[3] / "shared" / "traces")


@cache
def _read(path: Path) -> Trace:
    return read_trace(path)


def published(name: str) -> Trace:
    """Mooncake's FAST'25 trace of that name; the test is skipped where it isn't at hand."""
    path = FOLDER / f"{name}_trace.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path.name} in {FOLDER}; PAGETRIE_TRACES names the folder (Mooncake, FAST25-release/traces)")
    return _read(path)
