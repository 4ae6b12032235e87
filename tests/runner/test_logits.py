"""The model's logits against ``transformers`` in fp32, whatever the way the tokens come."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagetrie.models.config import RopeConfig
from pagetrie.runner import ModelRunner
from tests.runner.helpers import Driver, ModelCheckpoint, random_tokens, reference_logits, tiny_model

TOLERANCE = 1e-3


def exact_runner(checkpoint: ModelCheckpoint, num_pages: int, page_size: int) -> ModelRunner:
    return ModelRunner(checkpoint, num_pages=num_pages, page_size=page_size, weights="fp32", kv_dtype="fp32", threads=1)


def check(driver: Driver, reference: Any) -> None:
    for sequence in driver.sequences:
        expected = reference_logits(reference, sequence.tokens)
        error = (torch.stack(sequence.logits) - expected).abs().max().item()
        assert error < TOLERANCE, f"logits differ by {error}"


ROPES = {
    "default": RopeConfig(),
    "linear": RopeConfig("linear", factor=4.0),
    "llama3": RopeConfig("llama3", theta=500000.0, factor=8.0, original_max_position=256),
    "yarn": RopeConfig("yarn", factor=4.0, original_max_position=512),
    "yarn-mscale": RopeConfig("yarn", factor=8.0, original_max_position=128, mscale=0.7, mscale_all_dim=1.3, truncate=False),
    "yarn-factor": RopeConfig("yarn", factor=2.0, original_max_position=512, attention_factor=1.3, beta_fast=20.0),
}
CASES = {
    **{f"llama-{name}": ("llama", rope, {}) for name, rope in ROPES.items()},
    "llama-bias": ("llama-bias", None, {}),
    "llama-tied": ("llama", None, {"tie_word_embeddings": True}),
    "mistral-window": ("mistral", None, {"sliding_window": 50}),
    "qwen2": ("qwen2", None, {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", RopeConfig(theta=1e6), {"head_dim": 16}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_agree_with_transformers(case: str) -> None:
    family, rope, overrides = CASES[case]
    reference, checkpoint = tiny_model(family, rope, **overrides)
    driver = Driver(exact_runner(checkpoint, num_pages=200, page_size=16))
    for n, chunk in ((1, 1), (37, 37), (2100, 512)):
        driver.run(driver.add(random_tokens(n, seed=n)), chunk)
    check(driver, reference)
