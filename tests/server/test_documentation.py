"""docs/api.md and the code name the same fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagetrie.server.fields import IGNORED_FIELDS, UNSUPPORTED_FIELDS

API = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.mark.parametrize("name", [*IGNORED_FIELDS, *UNSUPPORTED_FIELDS])
def test_every_listed_field_is_documented_with_its_reason(name: str) -> None:
    reason = IGNORED_FIELDS.get(name) or UNSUPPORTED_FIELDS[name][0]
    assert f"| `{name}` | {reason} |" in API.read_text()
