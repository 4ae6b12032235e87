"""Every test that docs/security.md names as showing a claim is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_claim_of_the_threat_model_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    table = text[text.index("| claim | how | shown by |") :].split("\n\n")[0].splitlines()[2:]
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    tests = set(re.findall(r"^ *(?:async )?def (test_\w+)", "\n".join(files.values()), re.MULTILINE))
    assert len(table) > 15
    for row in table:
        claim, _, shown = (cell.strip() for cell in row.strip("|").split(" | "))
        named = re.findall(r"`([^`]*test_[^`]*)`", shown)
        assert named, f"nothing shows: {claim}"
        for name in named:
            if name.endswith(".py"):
                assert any(file.endswith(f"/{name}") or file == name for file in files), name
            elif name.endswith("_..."):
                assert any(test.startswith(name.removesuffix("...")) for test in tests), name
            else:
                assert name in tests, name
