"""Reading the trace formats, and saying what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagetrie.errors import ConfigError
from pagetrie.kv import RequestKind
from pagetrie.replay.trace import TraceRequest, read_trace

MOONCAKE = {"timestamp": 27482, "input_length": 1030, "output_length": 52, "hash_ids": [46, 47, 2353]}


def write(path: Path, *lines: Any) -> Path:
    file = path / "trace.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


def test_mooncake(tmp_path: Path) -> None:
    later = {**MOONCAKE, "timestamp": 30000, "hash_ids": [46, 47, 9]}
    trace = read_trace(write(tmp_path, later, MOONCAKE))
    assert trace.page_tokens == 512 and trace.pages == 6
    assert [request.time for request in trace.requests] == [27.482, 30.0]
    first, second = (request.pages for request in trace.requests)
    assert first[:2] == second[:2] and first[2] != second[2]


def test_vllm_is_told_from_mooncake_by_the_number_of_ids(tmp_path: Path) -> None:
    line = {"timestamp": 1500, "input_length": 40, "output_length": 5, "hash_ids": [7, 8, 9]}
    trace = read_trace(write(tmp_path, line))
    assert trace.page_tokens == 16 and trace.requests == [TraceRequest(1.5, 40, 5, [0, 1, 2])]
    forced = {**line, "hash_ids": [7, 8]}
    assert read_trace(write(tmp_path, forced), page_tokens=32).page_tokens == 32


def test_bailian(tmp_path: Path) -> None:
    line = {
        "chat_id": 5, "parent_chat_id": -1, "timestamp": 61.25, "input_length": 33, "output_length": 4,
        "type": "text", "turn": 1, "hash_ids": [2**63, "abc", 17],
    }  # fmt: skip
    trace = read_trace(write(tmp_path, line))
    assert trace.page_tokens == 16
    assert trace.requests == [TraceRequest(61.25, 33, 4, [0, 1, 2])]


def test_a_recorded_one(tmp_path: Path) -> None:
    lines = [
        {"pagetrie_trace": 1, "page_tokens": 32},
        {"t": 0.5, "in": 40, "out": 3, "pages": ["k1", "k2"]},
        {"t": 0.75, "in": 50, "out": 3, "pages": ["k1", "k3"], "kind": 3},
    ]
    trace = read_trace(write(tmp_path, *lines))
    assert trace.page_tokens == 32
    assert [(request.time, request.pages) for request in trace.requests] == [(0.5, [0, 1]), (0.75, [0, 2])]
    assert [request.kind for request in trace.requests] == [RequestKind.UNKNOWN, RequestKind.TOOL]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([""], "is empty"),
        (["{"], "line 1: not JSON"),
        (["[]"], "line 1: an object was expected"),
        ([{"some": 1, "thing": 2}], "no known trace; it has some, thing"),
        ([{"pagetrie_trace": 2, "page_tokens": 16}], "not the first line of a recorded trace"),
        ([{"pagetrie_trace": 1, "page_tokens": 0}], "not the first line of a recorded trace"),
        ([MOONCAKE, {**MOONCAKE, "timestamp": -1}], "line 2: the time must be"),
        ([MOONCAKE, {**MOONCAKE, "timestamp": float("nan")}], "line 2: the time must be"),
        ([MOONCAKE, {**MOONCAKE, "output_length": 1 << 40}], "lengths must be between 0 and"),
        ([MOONCAKE, {**MOONCAKE, "hash_ids": [1, 2]}], "2 page ids for 1030 tokens; at 512 tokens per page 3"),
        ([MOONCAKE, {**MOONCAKE, "hash_ids": [1, 2, None]}], "page ids must be"),
        ([MOONCAKE, {key: value for key, value in MOONCAKE.items() if key != "hash_ids"}], "'hash_ids' is missing"),
    ],
)
def test_errors_name_the_line_and_the_reason(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_trace(write(tmp_path, *lines))
    assert message in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read the trace"):
        read_trace(tmp_path / "none.jsonl")


def test_pages_that_begin_alike(tmp_path: Path) -> None:
    lines = [
        {"pagetrie_trace": 1, "page_tokens": 4},
        {"page": "c", "like": "b", "tokens": 2},
        {"page": "d", "like": "c", "tokens": 3},
        {"page": "e", "like": "c", "tokens": 1},
        {"page": "b", "like": "d", "tokens": 1},  # the other way round
        {"t": 0, "in": 6, "out": 3, "pages": ["a", "b"], "answer": ["c", "f"]},
        {"t": 1, "in": 8, "out": 1, "pages": ["a", "d"]},
        {"t": 2, "in": 7, "out": 1, "pages": ["a", "e"], "answer": ["e"]},
    ]
    trace = read_trace(write(tmp_path, *lines))
    first, second, third = trace.requests
    b, c, d = (trace.prompt_ids(request)[4:] for request in trace.requests)
    answer = trace.answer_ids(first)
    whole = [*b, *answer]
    assert len(answer) == 3 and len(whole) == 5
    assert d[0] == c[0] == whole[0] and c[:3] == whole[:3] and c[3] != whole[3] and d[1:] != c[1:3]
    assert trace.answer_ids(second) == [] and len(trace.answer_ids(third)) == 1
    ids = {*trace.prompt_ids(first), *answer, *trace.prompt_ids(second), *trace.prompt_ids(third)}
    assert min(ids) > 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"page": "a", "like": 1.5, "tokens": 2}, "must be page ids"),
        ({"page": "a", "like": "b", "tokens": 4}, "between 1 and 3, got 4"),
        ({"page": "a", "like": "b"}, "got None"),
        ({"t": 0, "in": 4, "out": 5, "pages": ["a"], "kind": 9}, "kind must be between 0 and 4, got 9"),
        ({"t": 0, "in": 4, "out": 5, "pages": ["a"], "answer": ["b"]}, "1 page ids for an answer of 5 tokens"),
        ({"t": 0, "in": 4, "out": 5, "pages": ["a"], "answer": [None]}, "the answer's page ids must be"),
    ],
)
def test_mistakes_about_pages_and_answers(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path, {"pagetrie_trace": 1, "page_tokens": 4}, line))
