"""The model's logits against ``transformers`` in fp32, whatever the way the tokens come."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from pagetrie.models.config import RopeConfig
from pagetrie.runner import ModelRunner, model_runner
from pagetrie.runner.native_attention import attention_planner
from tests.runner.helpers import Driver, ModelCheckpoint, random_tokens, reference_logits, tiny_model

TOLERANCE = 1e-3


@pytest.fixture(autouse=True, params=["native", "torch"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs over the kernels and over the reference."""
    kind = request.param
    monkeypatch.setattr(
        model_runner, "attention_planner", lambda storage, config, _: attention_planner(storage, config, kind)
    )


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
    "yarn-mscale": RopeConfig(
        "yarn", factor=8.0, original_max_position=128, mscale=0.7, mscale_all_dim=1.3, truncate=False
    ),
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
    for n, chunk in ((1, 1), (37, 37), (1100, 512)):
        driver.run(driver.add(random_tokens(n, seed=n)), chunk)
    check(driver, reference)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_mixed_batches_and_any_split_give_the_same_logits(family: str, page_size: int) -> None:
    """Prefill chunks and decode tokens of unequal sequences in one step, pages in random order."""
    reference, checkpoint = tiny_model(family, **({"sliding_window": 21} if family == "mistral" else {}))
    driver = Driver(exact_runner(checkpoint, num_pages=600 // page_size + 8, page_size=page_size))
    rng = random.Random(page_size)
    sequences = [driver.add(random_tokens(n, seed=n)) for n in (1, 15, 16, 17, 33, 90, 200)]
    while running := [s for s in sequences if s.computed < len(s.tokens)]:
        some = rng.sample(running, rng.randint(1, len(running)))
        driver.step([(s, rng.choice((1, 1, min(31, len(s.tokens) - s.computed)))) for s in some])
    check(driver, reference)


@pytest.mark.parametrize("page_size", [1, 16])
def test_shared_prefix_tree_decodes_as_each_alone(page_size: int) -> None:
    """A trie of three levels, its leaves decoding together, against ``transformers`` on each whole sequence."""
    reference, checkpoint = tiny_model("llama")
    driver = Driver(exact_runner(checkpoint, num_pages=2400 // page_size, page_size=page_size))
    trunk_tokens = random_tokens(320, seed=1)
    trunk = driver.add(trunk_tokens)
    driver.run(trunk, 320)
    leaves = []
    for branch in range(2):
        stem_tokens = trunk_tokens + random_tokens(130, seed=10 + branch)
        stem = driver.add(stem_tokens, shared=trunk, shared_tokens=320)
        driver.run(stem, 64)
        for leaf in range(3):
            tail = random_tokens(20 + 40 * leaf, seed=100 + 10 * branch + leaf)
            leaves.append(driver.add(stem_tokens[:448] + tail, shared=stem, shared_tokens=448))
    leaves.append(driver.add(random_tokens(45, seed=3)))
    for leaf in leaves:
        driver.run_until(leaf, len(leaf.tokens) - 4)
    for _ in range(4):
        driver.step([(leaf, 1) for leaf in leaves])
    check(driver, reference)


def test_sequences_beyond_the_window_decode_with_those_within() -> None:
    reference, checkpoint = tiny_model("mistral", sliding_window=300)
    driver = Driver(exact_runner(checkpoint, num_pages=150, page_size=16))
    tokens = random_tokens(288, seed=1)
    trunk = driver.add(tokens)
    driver.run(trunk, 288)
    leaves = [driver.add(tokens + random_tokens(n, seed=n), shared=trunk, shared_tokens=288) for n in (8, 9, 40, 200)]
    for leaf in leaves:
        driver.run_until(leaf, len(leaf.tokens) - 8)
    for _ in range(8):
        driver.step([(leaf, 1) for leaf in leaves])
    check(driver, reference)


def test_copied_page_serves_a_branch_that_parts_inside_it() -> None:
    """Copy-on-write: the copies come before the step's own writes, in order, and the source stays as it was."""
    reference, checkpoint = tiny_model("llama")
    driver = Driver(exact_runner(checkpoint, num_pages=20, page_size=16))
    tokens = random_tokens(40, seed=1)
    first = driver.add(tokens)
    driver.step([(first, 37)])
    second = driver.add(tokens[:37] + random_tokens(9, seed=2), shared=first, shared_tokens=32)
    second.computed, second.logits = 37, first.logits[:37]
    spare, source = driver.free.pop(), first.pages[2]
    driver.step([(first, 1), (second, 9)], copies=[(source, spare), (spare, second.pages[2])], poison=False)
    driver.run(first, 1)
    check(driver, reference)


def test_fp16_weights_and_pages_stay_close() -> None:
    """fp16 weights given in fp16 lose nothing; fp16 keys and values round. The bound is the rounding's size."""
    reference, checkpoint = tiny_model("llama")
    with torch.no_grad():
        for weight in reference.parameters():
            weight.copy_(weight.half().float())
    runner = ModelRunner(checkpoint, num_pages=20, page_size=16, threads=1)
    driver = Driver(runner)
    driver.run(driver.add(random_tokens(200, seed=1)), 64)
    expected = reference_logits(reference, driver.sequences[0].tokens)
    error = (torch.stack(driver.sequences[0].logits) - expected).abs().max().item()
    assert error < 2e-2 * expected.abs().max().item()


def test_a_hit_gives_the_numbers_of_a_miss() -> None:
    """With fp16 pages, the chunk that computes a prefix reads it back rounded, as a later hit does."""
    _, checkpoint = tiny_model("llama")
    driver = Driver(ModelRunner(checkpoint, num_pages=40, page_size=16, weights="fp32", threads=1))
    tokens = random_tokens(100, seed=1)
    whole = driver.add(tokens)
    cold = driver.run(whole, 100)
    warm = driver.run(driver.add(tokens, shared=whole, shared_tokens=96), 100)
    # Unrounded keys and values in the cold run would differ by about 1e-3 of the logits.
    assert (cold[96:] - warm[96:]).abs().max().item() < 2e-5 * cold.abs().max().item()
