"""``pagetrie explain``: two request bodies against each other, with the bundled model's tokenizer and template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagetrie.cli.explain import explain, show
from pagetrie.errors import ConfigError
from pagetrie.settings import Settings

RULES = "You are a librarian. " + "Answer in one sentence, and never make up an opening hour. " * 6


@pytest.fixture
def asked(bundled_model: Path, tmp_path: Path) -> Any:
    def ask(first: Any, second: Any) -> dict[str, Any]:
        paths = []
        for name, body in (("A", first), ("B", second)):
            paths.append(tmp_path / f"{name}.json")
            paths[-1].write_text(body if isinstance(body, str) else json.dumps(body))
        return explain(Settings(model=bundled_model), *paths)

    return ask


def chat(*contents: str, system: str = RULES, **fields: Any) -> dict[str, Any]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": [{"role": "system", "content": system}, *turns], **fields}


def test_a_clock_before_the_rules(asked: Any) -> None:
    found = asked(
        chat("When do you open?", system=f"It is 10:41. {RULES}"),
        chat("When do you open?", system=f"It is 11:02. {RULES}"),
    )
    assert found["reason"] == "differs" and found["common_tokens"] < 12
    assert [advice["code"] for advice in found["advice"]] == ["volatile_before_stable"]
    difference = found["first_difference"]
    assert difference["before"].endswith("It is 1") and difference["here"]["text"].startswith("1:02")
    assert "the second goes on '1:02" in show(found)


def test_the_next_turn_of_a_chat(asked: Any) -> None:
    found = asked(chat("When do you open?"), chat("When do you open?", "At nine.", "And on Sundays?"))
    assert found["reason"] == "never_stored" and found["advice"] == []
    assert found["cacheable_tokens"] == found["first_tokens"] == found["common_tokens"]


def test_a_template_that_opens_answers_otherwise_once_they_are_there(asked: Any) -> None:
    first = chat("When do you open?", "<think>", continue_final_message=True)
    found = asked(first, chat("When do you open?", "At nine.", "And on Sundays?"))
    assert found["reason"] == "differs"


def test_plain_prompts(asked: Any) -> None:
    assert asked({"prompt": RULES}, {"prompt": RULES})["reason"] == "complete"
    found = asked({"prompt": "Something"}, {"prompt": "Another thing"})
    assert found["reason"] == "never_stored" and found["common_tokens"] == 0
    found = asked({"prompt": RULES}, {"prompt": RULES, "cache_salt": "mine"})
    assert found["reason"] == "other_namespace" and found["cacheable_tokens"] == 0
    assert asked({"prompt": RULES, "cache_prompt": False}, {"prompt": RULES})["reason"] == "bypassed"


@pytest.mark.parametrize("body", ["{", "[]", '{"messages": 3}', '{"prompt": ["a", "b"]}', '{"prompt": "x", "foo": 1}'])
def test_what_is_no_request(asked: Any, body: str) -> None:
    with pytest.raises(ConfigError, match=r"B\.json is no request body"):
        asked({"prompt": RULES}, body)


def test_a_file_that_is_not_there(bundled_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read the request"):
        explain(Settings(model=bundled_model), tmp_path / "A.json", tmp_path / "B.json")
