"""What `make test` leaves to `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """Values for ``pytest.mark.parametrize``, all but the first ``count`` marked slow; tuples are for several names."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if place < count else pytest.mark.slow
        )
        for place, value in enumerate(values)
    ]
