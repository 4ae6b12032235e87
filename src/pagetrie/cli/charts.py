"""Bars in the terminal, and tables that are plain where there is no terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import ASCII, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

_WIDTH = 48
_PLAIN_WIDTH = 160


def console() -> Console:
    """For standard output; wide where that is no terminal, so that no table is squeezed."""
    made = Console()
    return made if made.is_terminal else Console(width=_PLAIN_WIDTH)


def table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text; the first column is left-aligned, the others are numbers."""
    made = Table(title=title, box=SIMPLE_HEAD if console.is_terminal else ASCII, title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    console.print(made)


def bars(console: Console, title: str, values: Sequence[tuple[str, float]], shown: Sequence[str]) -> None:
    """One bar per (label, value), the longest for the largest value; ``shown`` is printed behind each."""
    console.print(title, highlight=False)
    most = max((value for _, value in values), default=0.0)
    width = max((len(label) for label, _ in values), default=0)
    full = "█" if console.encoding.lower().startswith("utf") else "#"
    for (label, value), text in zip(values, shown, strict=True):
        bar = full * round(_WIDTH * value / most) if most > 0 else ""
        console.print(f"  {label:<{width}}  {bar:<{_WIDTH}}  {text}", highlight=False, markup=False)
