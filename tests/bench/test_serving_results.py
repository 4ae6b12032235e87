"""From runs to the table."""

from __future__ import annotations

import json

import pytest

from bench.serving_client import Reply
from bench.serving_results import Cell, Run, as_json, format_value, insert, markdown, ratio, summarise
from bench.serving_workloads import WORKLOADS

SINGLE, WARM = WORKLOADS["single"], WORKLOADS["warm"]


def run(rate: float = 10.0, ttft: float | None = 1.0, *, stopped: bool = False) -> Run:
    return Run(
        duration=10,
        requests=5,
        completed=4,
        total_input_tokens=2000,
        total_output_tokens=round(rate * 10),
        median_ttft=ttft,
        median_tpot=None,
        cached_tokens=1500,
        client_cpu=0.1,
        peak_rss=2**30,
        stopped=stopped,
    )


def reply(sent: float, first: float, ended: float, tokens: int, *, measured: bool = True) -> Reply:
    return Reply(100, measured, sent, first, ended, "x", tokens, tokens, 60)


def test_a_run_counts_what_was_measured_and_finished() -> None:
    running = Reply(100, True, sent=5, events=3)
    replies = [
        reply(0, 9, 9, 1, measured=False),
        reply(0, 1, 5, 5),
        reply(0, 2, 8, 4),
        reply(0, 6, 6, 1),
        running,
    ]
    result = summarise(replies, 10, 0.5, 7, stopped=True)
    assert (result.requests, result.completed) == (4, 3)
    assert (result.total_input_tokens, result.total_output_tokens) == (400, 5 + 4 + 1 + 3)
    assert (result.median_ttft, result.median_tpot) == (2, 1.5)
    assert result.cached_tokens == 180
    assert result.output_throughput == 1.3


def test_a_run_in_which_nothing_finished_has_no_times() -> None:
    result = summarise([Reply(100, True, sent=0)], 10, 0.5, 7, stopped=True)
    assert (result.median_ttft, result.median_tpot, result.cached_tokens, result.output_throughput) == (None,) * 3 + (
        0,
    )


def test_a_cell_is_the_median_of_its_rounds() -> None:
    cell = Cell([run(10, 3), run(30, 1), run(11, 2)])
    assert (cell.value("rate"), cell.value("ttft")) == (11, 2)
    assert (cell.shown("rate"), cell.shown("ttft")) == ("11 tok/s", "2.00 s")


def test_a_cell_without_a_figure_says_why() -> None:
    assert Cell().shown("rate") == "not run"
    assert Cell([run()], failure="failed: broke").shown("rate") == "failed: broke"
    stopped = Cell([run(2.5, stopped=True)])
    assert stopped.value("rate") is None
    assert stopped.shown("rate") == "stopped after 10 s (4 requests done, 2.5 tok/s so far)"
    assert stopped.shown("ttft") == "stopped after 10 s (4 requests done)"


@pytest.mark.parametrize(
    ("value", "metric", "shown"),
    [(117.26, "rate", "117 tok/s"), (8.4, "rate", "8.4 tok/s"), (0.2968, "ttft", "297 ms"), (4.126, "ttft", "4.13 s")],
)
def test_values_for_people(value: float, metric: str, shown: str) -> None:
    assert format_value(value, metric) == shown


def test_ratio_is_against_the_best_peer_and_above_one_is_better() -> None:
    cells = {
        ("pagetrie", "single"): Cell([run(30)]),
        ("a", "single"): Cell([run(20)]),
        ("b", "single"): Cell([run(15)]),
        ("pagetrie", "warm"): Cell([run(ttft=0.5)]),
        ("a", "warm"): Cell([run(ttft=2)]),
        ("b", "warm"): Cell([run(ttft=0.25)]),
    }
    systems = ["pagetrie", "a", "b"]
    assert ratio(cells, systems, SINGLE) == (1.5, "a")
    assert ratio(cells, systems, WARM) == (0.5, "b")
    assert ratio(cells, ["pagetrie"], SINGLE) is None
    assert ratio({**cells, ("pagetrie", "single"): Cell(failure="x")}, systems, SINGLE) is None
    assert ratio({**cells, ("a", "single"): Cell([run(20, stopped=True)])}, systems, SINGLE) == (2, "b")


def test_the_tables_show_figures_failures_versions_and_commands() -> None:
    cells = {
        ("pagetrie", "single"): Cell([run(30)]),
        ("a", "single"): Cell(failure="failed: a | b"),
        ("b", "single"): Cell([run(20)]),
    }
    text = markdown(cells, ["pagetrie", "a", "b"], [SINGLE], {"b": "1.2"}, {"b": "b serve"}, "A machine", 3)
    lines = text.splitlines()
    assert lines[0] == "A machine. Medians of 3 rounds."
    row = "| `single` (output): one stream, 32 in / 128 out | **30 tok/s** | failed: a / b | 20 tok/s | 1.50 (b) |"
    assert row in lines
    assert "| `single` | 1,500 of 2,000; 1.0 GiB | - | 1,500 of 2,000; 1.0 GiB |" in lines
    assert "| b | 1.2 | `b serve` |" in lines


def test_tables_go_between_a_pages_markers() -> None:
    page = "# Title\n<!-- serving: begin -->\nold\n<!-- serving: end -->\nrest\n"
    once = insert(page, "new\n")
    assert once == "# Title\n<!-- serving: begin -->\n\nnew\n\n<!-- serving: end -->\nrest\n"
    assert insert(once, "new\n") == once
    assert insert("no markers", "new\n") == "new\n"


def test_json_has_every_round() -> None:
    content = as_json({("a", "single"): Cell([run(1), run(2)])}, rounds=2)
    (row,) = json.loads(json.dumps(content))["rows"]
    assert (row["system"], row["workload"], row["failure"]) == ("a", "single", None)
    assert [r["output_throughput"] for r in row["rounds"]] == [1, 2]
    assert row["rounds"][0]["total_input_tokens"] == 2000
