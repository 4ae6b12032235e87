"""``pagetrie demo`` and the counting under it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagetrie.cli.demo import demo
from pagetrie.errors import ConfigError
from pagetrie.kv import CacheManager, ContiguousCacheManager
from pagetrie.kv.holding import Holding
from pagetrie.kv.metering import MeteredCache
from pagetrie.settings import Settings


def test_a_shared_page_counts_once_and_its_fullest_view_counts() -> None:
    cache = MeteredCache(CacheManager(num_pages=8, page_size=4))
    first = cache.open([1, 2, 3, 4, 5, 6])
    assert cache.measure() == Holding(0, 0, 0, 0, 0, 0)
    assert first.extend(6) == 0
    assert cache.measure() == Holding(1, 2, 8, 0, 2, 0)  # held, nothing computed yet
    first.commit(6)
    assert cache.measure() == Holding(1, 2, 8, 6, 2, 6)
    second = cache.open([1, 2, 3, 4, 9])
    assert second.extend(1) == 0
    second.commit(1)
    assert cache.measure() == Holding(2, 3, 12, 7, 4, 11)
    first.close()
    assert cache.measure() == Holding(1, 2, 8, 5, 2, 5)
    second.close()
    assert cache.measure() == Holding(0, 0, 0, 0, 0, 0)
    cache.check()


def test_a_reservation_counts_whole() -> None:
    cache = MeteredCache(ContiguousCacheManager(num_pages=8, page_size=4, max_tokens=16))
    lease = cache.open([1, 2, 3])
    assert lease.extend(3) == 0
    lease.commit(3)
    assert cache.measure() == Holding(1, 4, 16, 3, 4, 3)
    assert (cache.available_pages, cache.pages_for(1), cache.stats().active_pages) == (4, 4, 4)


def test_the_table_tells_hits_pages_and_waste(bundled_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(model=bundled_model, threads=1, num_pages=60, max_model_len=320)
    demo(settings, users=6, prompt_tokens=100, max_tokens=4)
    shown = capsys.readouterr()
    assert [line.partition(":")[0] for line in shown.err.splitlines()] == ["cold", "warm", "crowd"]

    def row(label: str) -> list[float]:
        (line,) = [line for line in shown.out.splitlines() if label in line]
        return [float(cell.strip(" %ms").replace(",", "")) for cell in line.split("|")[2:-1]]

    assert row("users running at once, peak") == [6, 3]  # 60 pages hold three reservations of 320 tokens
    ours, theirs = row("pages to hold all 6 at once")
    assert theirs == 6 * 20
    assert ours == row("pages held, peak")[0]
    shared = int(re.search(r"shared prefix of (\d+) tokens", shown.out)[1])  # type: ignore[index]
    assert shared >= 100
    # The prefix once, and for each of six at most the two to four pages that hold 20 to 40 tokens of its own.
    assert shared // 16 + 6 <= ours <= shared // 16 + 6 * 4
    hit_rate, none = row("hit rate, prompt tokens")
    assert 50 < hit_rate < 100 * 5 / 6
    assert none == 0
    waste_ours, waste_theirs = row("unused slots in held pages")
    assert 0 < waste_ours < 30
    assert waste_theirs > 40
    assert row("cold: alone")[0] > 0
    assert row("warm: alone")[0] > 0


def test_a_prompt_beyond_the_context_is_refused(bundled_model: Path) -> None:
    settings = Settings(model=bundled_model, threads=1, num_pages=8)
    with pytest.raises(ConfigError, match=r"needs \d+ tokens per user .* the context limit is 128"):
        demo(settings, users=2, prompt_tokens=200, max_tokens=4)
