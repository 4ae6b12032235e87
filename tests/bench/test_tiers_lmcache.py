"""The comparison of tiers with LMCache: what its engine's process says, and that our side compares bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import peers
from bench.peers import PeerError
from bench.tiers_lmcache import Tiers, lmcache
from pagetrie.kv.tiers.ram import RamTier
from pagetrie.models.config import ModelConfig, RopeConfig
from pagetrie.runner.storage import PageStorage

STORED = "echo '{\"stored\": []}'"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for the peer's Python."""
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    path = tmp_path / "peers" / "lmcache" / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.touch(0o755)
    return path


def answering(same: str, tokens: str = "$n") -> str:
    answer = f'{{\\"seconds\\": 0.5, \\"tokens\\": {tokens}, \\"same\\": {same}}}'
    return f'#!/bin/sh\n{STORED}\nwhile read n; do echo "{answer}"; done\n'


def test_the_engine_tells_how_long_it_took(script: Path, tmp_path: Path) -> None:
    script.write_text(answering("true"))
    with lmcache([], tmp_path / "log") as retrieve:
        assert [retrieve(32), retrieve(64)] == [0.5, 0.5]


@pytest.mark.parametrize("text", [answering("false"), answering("true", "16")])
def test_what_comes_back_short_or_changed_counts_for_nothing(script: Path, tmp_path: Path, text: str) -> None:
    script.write_text(text)
    with pytest.raises(PeerError, match="of 32 tokens back"), lmcache([], tmp_path / "log") as retrieve:
        retrieve(32)


@pytest.mark.parametrize("before", ["", f"{STORED}; read n; "])
def test_an_engine_that_ends_says_why(script: Path, tmp_path: Path, before: str) -> None:
    script.write_text(f"#!/bin/sh\n{before}echo 'no such backend' >&2; exit 3\n")
    with pytest.raises(PeerError, match="ended with 3: no such backend"), lmcache([], tmp_path / "log") as retrieve:
        retrieve(32)


def test_our_tiers_are_loaded_and_other_bytes_are_noticed() -> None:
    config = ModelConfig("llama", "tiny", 32, 16, 16, 2, 2, 1, 8, 1e-5, 64, RopeConfig())
    storage = PageStorage(3, 16, config)
    source = np.random.default_rng(0).integers(0, 256, (3, storage.bytes_per_page), np.uint8)
    tiers = Tiers(RamTier(1 << 20, storage.bytes_per_page), storage, source, [32, 48])
    assert tiers.load(48) > 0 and tiers.load(32) > 0
    source[1, 5] ^= 1
    with pytest.raises(AssertionError, match="other bytes"):
        tiers.load(32)
    tiers.close()
