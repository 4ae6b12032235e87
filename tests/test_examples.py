"""The examples run, and show what they say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_tree_of_thought_computes_and_holds_its_trunk_once(
    bundled_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(EXAMPLES / "tree_of_thought.py"))["main"](["6", "6", "6", "6", "--model", str(bundled_model)])
    found, work, pages = capsys.readouterr().out.splitlines()
    assert found.startswith("found: ")
    branches, prompts, computed = map(int, re.findall(r"\d+", work))
    assert branches >= 4 and prompts > branches * 250
    assert computed < prompts / 5
    held, unshared, saved = map(int, re.findall(r"\d+", pages))
    assert held < unshared / 3 and saved >= 67


def test_the_rules_of_the_game_are_kept() -> None:
    example = runpy.run_path(str(EXAMPLES / "tree_of_thought.py"))
    assert ("3 * 8 = 24", (1, 24)) in list(example["moves"]((1, 3, 8)))
    assert example["reachable"]((1, 3, 8)) and example["reachable"]((4, 6, 1, 1))
    assert not example["reachable"]((1, 1, 1, 1))
