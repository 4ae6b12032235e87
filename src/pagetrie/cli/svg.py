"""Bar charts as SVG files: no more than ``--plot`` needs, so that no plotting library has to be installed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from pagetrie.cli.charts import Chart
from pagetrie.errors import ConfigError

_WIDTH, _PLOT_HEIGHT = 960, 240
_LEFT, _RIGHT, _TOP, _GAP = 72, 24, 64, 56
# Okabe and Ito's colours, which people with any colour vision can tell apart, and greys after them.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#f0e442", "#000000", "#7f7f7f")


def write_svg(path: Path, charts: Sequence[Chart]) -> None:
    """Write charts, one below the other.

    Raises:
        ConfigError: the file can't be written.
    """
    height = len(charts) * (_TOP + _PLOT_HEIGHT + _GAP)
    body = "".join(_panel(chart, number * (_TOP + _PLOT_HEIGHT + _GAP)) for number, chart in enumerate(charts))
    document = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="#fff"/>\n{body}'
        "</svg>\n"
    )
    try:
        path.write_text(document, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't write the plot {path}: {error.strerror}") from error


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to ``most`` or just above, four to eight of them."""
    if not most > 0:
        return [0.0, 1.0]
    rough = most / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    return [step * number for number in range(math.ceil(most / step - 1e-9) + 1)]


def _panel(chart: Chart, top: int) -> str:
    marks = ticks(max((value for values in chart.series.values() for value in values), default=0.0))
    bottom = top + _TOP + _PLOT_HEIGHT
    width = _WIDTH - _LEFT - _RIGHT
    parts = [_text(_LEFT, top + 24, chart.title, size=15, weight="bold")]
    place = float(_LEFT)
    for number, name in enumerate(chart.series):
        parts.append(_box(place, top + 36, 10, 10, _COLOURS[number % len(_COLOURS)]))
        parts.append(_text(place + 14, top + 45, name))
        place += 34 + 7 * len(name)
    for mark in marks:
        y = bottom - _PLOT_HEIGHT * mark / marks[-1]
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>\n')
        parts.append(_text(_LEFT - 6, y + 4, f"{mark:,.6g}", anchor="end"))
    room = width / max(1, len(chart.groups))
    bar = 0.8 * room / max(1, len(chart.series))
    for place_of_group, group in enumerate(chart.groups):
        begin = _LEFT + room * place_of_group + 0.1 * room
        parts.append(_text(begin + 0.4 * room, bottom + 18, group, anchor="middle"))
        for number, (name, values) in enumerate(chart.series.items()):
            value = values[place_of_group]
            tall = _PLOT_HEIGHT * value / marks[-1] if value > 0 else 0.0
            label = f"{name}, {group}: {format(value, chart.form)}"
            x = begin + bar * number
            parts.append(_box(x, bottom - tall, bar * 0.92, tall, _COLOURS[number % len(_COLOURS)], label))
            if bar > 34:  # else the title alone tells, to whoever points at the bar
                parts.append(_text(x + bar * 0.46, bottom - tall - 4, format(value, chart.form), "middle", size=10))
    parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}" stroke="#333"/>\n')
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str = "start", *, size: int = 12, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}">'
        f"{escape(text)}</text>\n"
    )


def _box(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}">{inner}</rect>\n'
