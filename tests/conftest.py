"""Fixtures that any test may ask for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagetrie.bundled import bundled_model_path

# As in pagetrie.models, which tests that import torch first would be too late for.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# No test leaves pages in the home of whoever runs it; those about the disk cache name a folder.
os.environ["PAGETRIE_NO_DISK_CACHE"] = "1"


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """The SmolLM2-135M-Instruct file that ``make setup`` fetches. Its absence is an error, never a skip."""
    return bundled_model_path()
