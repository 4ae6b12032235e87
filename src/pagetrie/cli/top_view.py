"""How ``pagetrie top`` shows a sample: as a screen, and as one line."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.box import ASCII, SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from pagetrie.cli.top_sample import Sample
from pagetrie.settings import format_size

PREFIXES = 8
_STYLES = {"active": "green", "cached": "blue", "loading": "yellow", "free": "dim"}
_BLOCKS = {"active": "█", "cached": "▒", "loading": "▓", "free": "·"}
_ASCII_BLOCKS = {"active": "#", "cached": "=", "loading": "+", "free": "."}
_PHASES = {"queued": "yellow", "prefill": "cyan", "decode": "green", "preempted": "red", "done": "dim"}
_TENANT_COLUMNS = (
    "tenant", "active pages", "cached pages", "in flight", "admitted", "refused", "prompt", "cached", "generated"
)  # fmt: skip
# Of an edge: see EDGE_FIELDS of the server's live_frame.
_PARENT, _OWNER, _TOKENS, _BELOW, _LEAVES, _HEAT, _LABEL = 1, 2, 4, 6, 7, 10, 12


def line(sample: Sample, rates: dict[str, float]) -> str:
    """The most important numbers, for a log."""
    load, pages, latency = sample.frame["load"], sample.frame["pages"], sample.frame["latency"]
    moment = datetime.fromtimestamp(sample.time, UTC).isoformat(timespec="seconds")
    return (
        f"{moment} running {load['running']} waiting {load['waiting']} prefill {_rate(rates, 'prefill_tokens')} "
        f"decode {_rate(rates, 'generated_tokens')} pages {pages['active']} active {pages['cached']} cached "
        f"{pages['free']} free of {pages['total']} hits {_hits(sample)} ttft {_p50(latency['ttft'])} "
        f"tpot {_p50(latency['tpot'])} preemptions {load['preemptions']}"
    )


def screen(sample: Sample, rates: dict[str, float], rows: int, problem: str = "") -> RenderableType:
    """Everything, with at most so many requests. ``problem`` says why this isn't the newest."""
    parts: list[RenderableType] = [_head(sample)]
    if problem:
        parts.append(Text(_printable(problem), style="bold red"))
    parts += [_numbers(sample, rates), PageBar(sample.frame["pages"]), _memory(sample), _cache(sample)]
    if sample.tenants:
        parts.append(_tenants(sample))
    if sample.frame["tree"]["edges"]:
        parts.append(_prefixes(sample))
    parts.append(_requests(sample, rows))
    return Group(*parts)


class PageBar:
    """The pool as one bar, by state."""

    def __init__(self, pages: dict[str, Any]) -> None:
        self._pages = pages

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        blocks = _BLOCKS if _is_utf(console) else _ASCII_BLOCKS
        width, total = options.max_width, max(1, self._pages["total"])
        bar, legend, done, drawn = Text(), Text(), 0, 0
        for state, style in _STYLES.items():
            count = self._pages[state]
            done += count
            bar.append(blocks[state] * (done * width // total - drawn), style)
            drawn = done * width // total
            legend.append(f"{blocks[state]} {state} {count:,}   ", style)
        legend.append(f"of {self._pages['total']:,} pages; {self._pages['pinned']:,} pinned, ")
        legend.append(f"{self._pages['evicted']:,} evicted, {self._pages['copied']:,} copied")
        yield bar
        yield legend


def _head(sample: Sample) -> Text:
    server = sample.frame["server"]
    up = ""
    if "started" in sample.totals:
        up = f", up {timedelta(seconds=max(0, int(sample.time - sample.totals['started'])))}"
    memory = f", {format_size(int(sample.totals['memory_bytes']))} resident" if "memory_bytes" in sample.totals else ""
    moment = datetime.fromtimestamp(sample.time, UTC).strftime("%H:%M:%S UTC")
    head = Text("pagetrie ", style="bold")
    return head.append(f"{server['version']}  {_printable(server['model'])}  {moment}{up}{memory}", style="not bold")


def _numbers(sample: Sample, rates: dict[str, float]) -> Table:
    load, latency = sample.frame["load"], sample.frame["latency"]
    ended = ", ".join(f"{int(count):,} {reason}" for reason, count in sample.finished.items() if count) or "none"
    grid = Table.grid(padding=(0, 3))
    grid.add_row(
        f"running {load['running']}",
        f"waiting {load['waiting']}",
        f"contexts {load['contexts']}",
        f"preemptions {load['preemptions']}",
        f"ended: {ended}",
    )
    grid.add_row(
        f"prefill {_rate(rates, 'prefill_tokens')}",
        f"decode {_rate(rates, 'generated_tokens')}",
        f"first token {_quantiles(latency['ttft'])}",
        f"per token {_quantiles(latency['tpot'])}",
        f"ms, over {latency['window']:g} s",
    )
    return grid


def _memory(sample: Sample) -> Text:
    memory = sample.frame["memory"]
    if not memory["pages"]:
        return Text("nothing is held")
    share = memory["references"] / memory["pages"]
    unused = memory["unused"] / memory["slots"]
    reserved = memory["unused_if_reserved"] / memory["reserved"] if memory["reserved"] else 0.0
    return Text(
        f"held {memory['pages']:,} pages, each in {share:.2f} page tables; unused slots {unused:.1%}, "
        f"with a reservation each {reserved:.1%}"
    )


def _cache(sample: Sample) -> Text:
    frame = sample.frame
    hits = frame["hits"]
    parts = [f"cached {_hits(sample)} of prompt tokens"]
    if hits["prompt"]:
        parts += [f"{tier} {tokens / hits['prompt']:.1%}" for tier, tokens in hits["tiers"].items() if tokens]
    misses = sorted(frame["misses"].items(), key=lambda item: -item[1])
    parts.append("requests: " + (", ".join(f"{count:,} {reason}" for reason, count in misses) or "none"))
    for name, tier in frame["tiers"].items():
        of = f" of {format_size(tier['capacity'])}" if tier["capacity"] else ""
        parts.append(f"{name} {format_size(tier['used'])}{of}{'' if tier['healthy'] else ' FAILING'}")
    return Text("; ".join(parts))


def _tenants(sample: Sample) -> TableOf:
    rows = [
        [
            _printable(name),
            f"{int(count.get('active_pages', 0)):,}",
            f"{int(count.get('cached_pages', 0)):,}",
            f"{int(count.get('in_flight', 0)):,}",
            f"{int(count.get('admitted', 0)):,}",
            f"{int(count.get('refused', 0)):,}",
            f"{int(count.get('prompt_tokens', 0)):,}",
            f"{int(count.get('cached_tokens', 0)):,}",
            f"{int(count.get('completion_tokens', 0)):,}",
        ]
        for name, count in sorted(sample.tenants.items())
    ]
    return TableOf(_TENANT_COLUMNS, rows, left=1)


def _prefixes(sample: Sample) -> TableOf:
    tree, owners = sample.frame["tree"], sample.frame["owners"]
    largest = sorted((edge for edge in tree["edges"] if edge[_PARENT] < 0), key=lambda edge: -edge[_BELOW])
    rows = []
    for edge in largest[:PREFIXES]:
        owner = owners[edge[_OWNER]] if 0 <= edge[_OWNER] < len(owners) else None
        whose = "?" if owner is None else "public" if owner["public"] else owner["tenant"] or "-"
        text = "(not yours to read)" if edge[_LABEL] is None else _printable(edge[_LABEL])
        numbers = [f"{edge[_BELOW]:,}", f"{edge[_TOKENS]:,}", f"{edge[_LEAVES]:,}", str(edge[_HEAT])]
        rows.append([*numbers, _printable(whose), text])
    columns = ("tokens", "in trunk", "ends", "heat", "tenant", "largest prefixes")
    return TableOf(columns, rows, right=4)


def _requests(sample: Sample, rows: int) -> TableOf:
    requests = sample.frame["requests"]
    shown: list[list[RenderableType]] = []
    for request in requests[:rows]:
        phase, ago = request["phases"][-1]
        began = request["phases"][0][1]
        lasted = ago if phase != "done" else began - ago
        shown.append(
            [
                _printable(request["id"]),
                _printable(request["tenant"] or "-"),
                Text(_printable(request["reason"]) if phase == "done" else phase, style=_PHASES.get(phase, "")),
                f"{lasted:.1f} s",
                f"{request['prompt']:,}",
                f"{request['cached']:,}",
                f"{request['generated']:,}" + (f"/{request['max']:,}" if request["max"] else ""),
                f"{request['pages']:,}",
                str(request["preemptions"]),
            ]
        )
    more = len(requests) - len(shown) + sample.frame["more_waiting"]
    columns = ("request", "tenant", "phase", "for", "prompt", "cached", "generated", "pages", "preempted")
    return TableOf(columns, shown, left=3, foot=f"and {more} more" if more else "")


class TableOf:
    """A table of text; lines only where there is a terminal to draw them."""

    def __init__(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[RenderableType]],
        *,
        left: int | None = None,
        right: int = 0,
        foot: str = "",
    ) -> None:
        self._columns = columns
        self._rows = rows
        self._left = right if left is None else left
        self._right = right
        self._foot = foot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=SIMPLE_HEAD if _is_utf(console) else ASCII, pad_edge=False)
        for number, column in enumerate(self._columns):
            numbers = number < self._right if self._right else number >= self._left
            table.add_column(column, justify="right" if numbers else "left", no_wrap=True, overflow="ellipsis")
        for row in self._rows:
            table.add_row(*row)
        yield table
        if self._foot:
            yield Text(self._foot)


def _is_utf(console: Console) -> bool:
    return console.is_terminal and console.encoding.lower().startswith("utf")


def _rate(rates: dict[str, float], name: str) -> str:
    return f"{rates[name]:,.0f} tok/s" if name in rates else "- tok/s"


def _hits(sample: Sample) -> str:
    hits = sample.frame["hits"]
    return f"{sum(hits['tiers'].values()) / hits['prompt']:.1%}" if hits["prompt"] else "-"


def _p50(times: dict[str, float]) -> str:
    return f"{times['p50']:.0f} ms" if times["count"] else "-"


def _quantiles(times: dict[str, float]) -> str:
    return "/".join(f"{times[name]:.0f}" for name in ("p50", "p90", "p99")) if times["count"] else "-"


def _printable(text: str) -> str:
    """Without anything that a terminal would obey: what users sent is shown here."""
    return "".join(letter if letter.isprintable() else "·" for letter in text)
