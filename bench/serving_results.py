"""From runs to medians, ratios and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from bench.serving_client import Reply
from bench.serving_workloads import Workload

OURS = "pagetrie"
_BEGIN, _END = "<!-- serving: begin -->", "<!-- serving: end -->"


@dataclass(frozen=True, slots=True)
class Run:
    """One system on one workload once, in vLLM's names for what they share. Times in seconds.

    Attributes:
        completed: requests answered in full, of ``requests`` sent.
        total_output_tokens: of a stopped run, chunks of text received until then.
        cached_tokens: prompt tokens that the system says it took from its cache; None if it doesn't say.
        client_cpu: CPU seconds that this client used.
        stopped: the run hit its time limit.
    """

    duration: float
    requests: int
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    median_ttft: float | None
    median_tpot: float | None
    cached_tokens: int | None
    client_cpu: float
    peak_rss: int = 0
    stopped: bool = False

    @property
    def output_throughput(self) -> float:
        return self.total_output_tokens / self.duration


def summarise(replies: Sequence[Reply], duration: float, client_cpu: float, peak_rss: int, *, stopped: bool) -> Run:
    """What a run's replies amount to. Priming requests count in nothing but the time."""
    counted = [reply for reply in replies if reply.measured]
    done = [reply for reply in counted if reply.completion_tokens]
    reported = [reply.cached_tokens for reply in done if reply.cached_tokens is not None]
    tpots = [reply.tpot for reply in done if reply.tpot is not None]
    return Run(
        duration=duration,
        requests=len(counted),
        completed=len(done),
        total_input_tokens=sum(reply.prompt_tokens for reply in counted),
        total_output_tokens=sum(reply.completion_tokens or reply.events for reply in counted),
        median_ttft=median(reply.ttft for reply in done) if done else None,
        median_tpot=median(tpots) if tpots else None,
        cached_tokens=sum(reported) if reported else None,
        client_cpu=client_cpu,
        peak_rss=peak_rss,
        stopped=stopped,
    )


@dataclass(slots=True)
class Cell:
    """A system on a workload over the rounds. ``failure`` says in one line why there is no figure, or no more."""

    runs: list[Run] = field(default_factory=list)
    failure: str | None = None

    def value(self, metric: str) -> float | None:
        """The median of finished runs: seconds to the first token ("ttft"), or output tokens per second ("rate")."""
        finished = [run for run in self.runs if not run.stopped]
        values = [run.median_ttft if metric == "ttft" else run.output_throughput for run in finished]
        known = [value for value in values if value is not None]
        return median(known) if known and self.failure is None else None

    def shown(self, metric: str) -> str:
        """For the table."""
        value = self.value(metric)
        if value is not None:
            return format_value(value, metric)
        stopped = next((run for run in self.runs if run.stopped), None)
        if stopped is not None and self.failure is None:
            so_far = f", {stopped.output_throughput:.3g} tok/s so far" if metric == "rate" else ""
            return f"stopped after {stopped.duration:.0f} s ({stopped.completed} requests done{so_far})"
        return self.failure or "not run"


Cells = Mapping[tuple[str, str], Cell]
"""By (system, workload)."""


def format_value(value: float, metric: str) -> str:
    if metric == "rate":
        return f"{value:.3g} tok/s"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def ratio(cells: Cells, systems: Sequence[str], workload: Workload) -> tuple[float, str] | None:
    """How many times better this project is than the best peer (more tokens per second, or less time), and which that
    is. None if either has no figure.
    """
    ours = cells.get((OURS, workload.name), Cell()).value(workload.metric)
    peers = {
        name: value
        for name in systems
        if name != OURS and (value := cells.get((name, workload.name), Cell()).value(workload.metric)) is not None
    }
    if ours is None or not peers:
        return None
    if workload.metric == "ttft":
        best = min(peers, key=lambda name: peers[name])
        return peers[best] / ours, best
    best = max(peers, key=lambda name: peers[name])
    return ours / peers[best], best


def markdown(
    cells: Cells,
    systems: Sequence[str],
    workloads: Sequence[Workload],
    versions: Mapping[str, str],
    commands: Mapping[str, str],
    machine: str,
    rounds: int,
) -> str:
    """The tables, the versions and the commands."""
    lines = [
        f"{machine}. Medians of {rounds} round{'s' if rounds > 1 else ''}.",
        "The last column is pagetrie's figure against the best peer's (above 1: better).",
        "",
        f"| workload | {' | '.join(systems)} | ratio |",
        f"|---|{'---|' * len(systems)}---|",
    ]
    for workload in workloads:
        found = ratio(cells, systems, workload)
        best = max(
            (name for name in systems if cells[name, workload.name].value(workload.metric) is not None),
            key=lambda name: _goodness(cells[name, workload.name].value(workload.metric), workload.metric),
            default=None,
        )
        shown = [cells[name, workload.name].shown(workload.metric).replace("|", "/") for name in systems]
        shown = [f"**{text}**" if name == best else text for name, text in zip(systems, shown, strict=True)]
        against = f"{found[0]:.2f} ({found[1]})" if found else "-"
        unit = "TTFT" if workload.metric == "ttft" else "output"
        lines.append(f"| `{workload.name}` ({unit}): {workload.what} | {' | '.join(shown)} | {against} |")
    lines += ["", "Cached prompt tokens of all prompt tokens, as each system reports them; peak memory.", ""]
    lines += [f"| workload | {' | '.join(systems)} |", f"|---|{'---|' * len(systems)}"]
    for workload in workloads:
        shown = [_cached(cells[name, workload.name]) for name in systems]
        lines.append(f"| `{workload.name}` | {' | '.join(shown)} |")
    lines += ["", "| system | version | started with |", "|---|---|---|"]
    lines += [f"| {name} | {versions.get(name, '-')} | `{commands.get(name, '-')}` |" for name in systems]
    return "\n".join(lines) + "\n"


def _goodness(value: float | None, metric: str) -> float:
    return -(value or 0.0) if metric == "ttft" else (value or 0.0)


def _cached(cell: Cell) -> str:
    if not cell.runs:
        return "-"
    run = cell.runs[-1]
    cached = "not reported" if run.cached_tokens is None else f"{run.cached_tokens:,} of {run.total_input_tokens:,}"
    return f"{cached}; {max(run.peak_rss for run in cell.runs) / 2**30:.1f} GiB"


def as_json(cells: Cells, **about: Any) -> dict[str, Any]:
    """Everything measured, per system and workload."""
    rows = [
        {
            "system": system,
            "workload": workload,
            "failure": cell.failure,
            "rounds": [asdict(run) | {"output_throughput": run.output_throughput} for run in cell.runs],
        }
        for (system, workload), cell in cells.items()
    ]
    return {**about, "rows": rows}


def insert(page: str, tables: str) -> str:
    """The page with the tables between its markers; the tables alone if it has none."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{tables}\n{_END}{after}" if begin and end else tables
