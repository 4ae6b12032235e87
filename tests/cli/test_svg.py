"""Bar charts as SVG."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from pagetrie.cli.charts import Chart
from pagetrie.cli.svg import ticks, write_svg

SVG = "{http://www.w3.org/2000/svg}"


def bars(path: Path) -> dict[str, tuple[float, float]]:
    """Top and height of each bar, by its title."""
    found = {}
    for box in ElementTree.parse(path).iter(f"{SVG}rect"):
        title = box.find(f"{SVG}title")
        if title is not None and title.text:
            found[title.text] = float(box.attrib["y"]), float(box.attrib["height"])
    return found


def test_bars_are_as_tall_as_their_values(tmp_path: Path) -> None:
    chart = Chart("a < b & c", ["10", "20"], {"lru": [0.5, 0.25], "fifo": [0.0, 1.0]}, ".2f")
    write_svg(tmp_path / "plot.svg", [chart, Chart("none", ["x"], {"y": [0.0]})])
    found = bars(tmp_path / "plot.svg")
    assert list(found) == ["lru, 10: 0.50", "fifo, 10: 0.00", "lru, 20: 0.25", "fifo, 20: 1.00", "y, x: 0"]
    height = found["fifo, 20: 1.00"][1]
    assert found["lru, 10: 0.50"][1] == pytest.approx(height / 2, abs=0.1)
    assert found["lru, 20: 0.25"][1] == pytest.approx(height / 4, abs=0.1)
    assert len({round(top + tall) for label, (top, tall) in found.items() if label != "y, x: 0"}) == 1
    assert "a < b & c" in [element.text for element in ElementTree.parse(tmp_path / "plot.svg").iter(f"{SVG}text")]


@pytest.mark.parametrize("most", [1e-6, 0.03, 0.999, 1.0, 4.2, 17, 101, 5e9])
def test_ticks_are_round_and_reach_the_top(most: float) -> None:
    marks = ticks(most)
    assert 4 <= len(marks) <= 8 and marks[0] == 0 and most * (1 - 1e-9) <= marks[-1] < 1.7 * most
    digits = f"{marks[1]:e}".split("e")[0].rstrip("0").rstrip(".")
    assert digits in ("1", "2", "5")
