"""Codecs of pages in memory keep within their gates on the real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.quality_pages import compare_codecs
from pagetrie.models.loading import load_checkpoint


@pytest.mark.slow
def test_codecs_keep_within_their_gates_and_none_changes_nothing(bundled_model: Path) -> None:
    """With fp16 weights, whose runs differ by nothing else; over text that comes with Python."""
    found = compare_codecs(
        load_checkpoint(bundled_model), ["none", "int8", "k8v4"], windows=4, prefix=256, rest=96, weights="fp16"
    )
    assert all(difference.within_gate(codec) for codec, difference in found.items()), found
    assert found["none"].mean_kl == 0
    assert 1e-5 < found["int8"].mean_kl < found["k8v4"].mean_kl, "nothing went through the codecs"
    assert [found[codec].page_bytes for codec in ("none", "int8", "k8v4")] == [368_640, 190_080, 146_880]
