"""Fixtures that any test may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagetrie.bundled import bundled_model_path


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """The SmolLM2-135M-Instruct file that ``make setup`` fetches. Its absence is an error, never a skip."""
    return bundled_model_path()
