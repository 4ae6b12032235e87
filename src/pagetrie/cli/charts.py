"""Tables that are plain where there is no terminal, and charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import ASCII, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

TERMINAL = Path("-")
"""As a plot's file: bars in the terminal."""

_WIDTH = 48
_PLAIN_WIDTH = 160


def console(*, stderr: bool = False) -> Console:
    """For standard output, or error where that is JSON; wide where it is no terminal, so that no table is squeezed."""
    made = Console(stderr=stderr)
    return made if made.is_terminal else Console(stderr=stderr, width=_PLAIN_WIDTH)


def table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text; the first column is left-aligned, the others are numbers."""
    made = Table(title=title, box=SIMPLE_HEAD if console.is_terminal else ASCII, title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    console.print(made)


@dataclass(frozen=True, slots=True)
class Chart:
    """Bars in groups.

    Attributes:
        groups: their names.
        series: by name, one value per group, at least 0.
        form: how values are written.
    """

    title: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float]]
    form: str = ",.0f"


def plot(console: Console, charts: Sequence[Chart], file: Path | None) -> None:
    """Draw charts into an SVG file, or with ``-`` as bars in the terminal; nothing without a file.

    Raises:
        ConfigError: the file can't be written.
    """
    if file == TERMINAL:
        for chart in charts:
            _bars(console, chart)
    elif file is not None:
        from pagetrie.cli.svg import write_svg

        write_svg(file.expanduser(), charts)


def _bars(console: Console, chart: Chart) -> None:
    """One bar per series and group, the longest for the largest value."""
    console.print(chart.title, highlight=False)
    rows = [
        (f"{name} {group}", values[number])
        for number, group in enumerate(chart.groups)
        for name, values in chart.series.items()
    ]
    most = max((value for _, value in rows), default=0.0)
    width = max((len(label) for label, _ in rows), default=0)
    full = "█" if console.encoding.lower().startswith("utf") else "#"
    for label, value in rows:
        bar = full * round(_WIDTH * value / most) if most > 0 else ""
        text = format(value, chart.form)
        console.print(f"  {label:<{width}}  {bar:<{_WIDTH}}  {text}", highlight=False, markup=False)
