"""Sizing on paper, against the field's known figures and by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pagetrie.assembly import pool_pages
from pagetrie.engine.runner import SequenceStep, StepPlan
from pagetrie.errors import ConfigError
from pagetrie.models.config import Architecture, ModelConfig, RopeConfig
from pagetrie.plan.devices import DEVICES, Device
from pagetrie.plan.estimate import Efficiency, Load, Planner
from pagetrie.plan.shapes import SHAPES, shape_from_config
from pagetrie.runner.storage import KvDtype, bytes_per_page
from pagetrie.settings import Settings

MIB, GIB = 2**20, 2**30
FULL = Efficiency(1.0, 1.0, 1.0)


def planner(name: str = "llama-3.1-70b", device: str = "h100-80gb", weights: float = 38e9) -> Planner:
    return Planner(SHAPES[name], DEVICES[device], weights)


def test_llama_70b_takes_what_everyone_says() -> None:
    plan = planner()
    assert plan.sequence_bytes(1, "fp16") / MIB == pytest.approx(0.3125)
    assert plan.sequence_bytes(131_072, "fp16") / GIB == pytest.approx(40)


def test_an_80_gb_card_holds_two_or_three_long_requests_reserved_whole() -> None:
    load = Load(prompt=30_000, output=1000, spread=0, shared=0, context=32_768)
    assert planner().fit(load, "fp16").contiguous in (2, 3)


def test_deepseeks_latent_takes_a_fraction() -> None:
    # 61 layers of 512 + 64 values: 70 KB a token (DeepSeek-V3's report), against 516 KB for Llama 405B.
    assert SHAPES["deepseek-v3"].values_per_token() * 2 == pytest.approx(70_272)
    assert SHAPES["llama-3.1-405b"].values_per_token() * 2 == pytest.approx(516_096)


def test_windows_stop_growing() -> None:
    shape = SHAPES["gemma-3-27b"]
    short, long = shape.cached_values(1024), shape.cached_values(100_000)
    assert short == 1024 * shape.values_per_token()
    assert long - short == pytest.approx((100_000 - 1024) * 10 * shape.values_per_layer)


def test_more_fits_with_pages_with_sharing_and_with_smaller_codecs() -> None:
    load = Load(prompt=2000, output=500, spread=0.8, shared=1500, context=32_768)
    fits = [planner().fit(load, codec) for codec in ("fp16", "int8", "k8v4", "int4", "int2")]
    for fit in fits:
        assert 0 < fit.contiguous < fit.paged < fit.shared
    for small, big in zip(fits[1:], fits, strict=False):
        assert small.bytes_per_token < big.bytes_per_token and small.paged > big.paged


def test_a_fit_by_hand() -> None:
    device = Device("toy", 1e9, 1e9, 1e12)
    plan = Planner(SHAPES["smollm2-135m"], device, 0.5e9, FULL)
    per_token = 30 * 2 * 3 * 64 * 2
    assert plan.cache_bytes == 0.5e9
    fit = plan.fit(Load(prompt=90, output=10, spread=0, shared=64, context=1000), "fp16")
    assert fit.bytes_per_token == per_token and fit.tokens == int(0.5e9 / per_token)
    assert fit.contiguous == 0.5e9 // (1000 * per_token)
    assert fit.paged == 0.5e9 // (112 * per_token)
    assert fit.shared == (0.5e9 - 64 * per_token) // (48 * per_token)


def test_times_by_hand() -> None:
    device = Device("toy", 1e12, 1e9, 1e12)
    plan = Planner(SHAPES["smollm2-135m"], device, 0.1e9, FULL)
    active, width = 0.1345e9, 9 * 64 * 30
    flops = 2 * active * 1000 + 4 * width * (1000 * 1001 / 2)
    assert plan.ttft(1000) == pytest.approx(flops / 1e12)
    assert plan.ttft(1) == pytest.approx((0.1e9 + 23_040) / 1e9)  # bytes are the limit
    assert plan.tpot(4, 100) == pytest.approx((0.1e9 + 400 * 23_040) / 1e9)


def test_a_miss_costs_what_a_hit_saves_and_decides_which_tier_pays() -> None:
    plan = planner()
    miss = plan.miss_cost(4000, 3600)
    assert miss == pytest.approx(plan.ttft(4000) - plan.ttft(400, 3600)) and miss > 0
    rate = plan.worthwhile_bandwidth(4000, 3600)
    assert rate == pytest.approx(plan.sequence_bytes(3600, "fp16") / miss)
    assert plan.worthwhile_bandwidth(4000, 0) == math.inf


def test_experts_are_read_as_far_as_tokens_pass_them() -> None:
    plan = Planner(SHAPES["qwen3-30b-a3b"], DEVICES["h100-80gb"], 61e9)
    assert plan.tpot(1, 100) < plan.tpot(4, 100) < plan.tpot(64, 100)
    assert plan.tpot(1, 100) == pytest.approx(61e9 * 3.35 / 30.53 / (3350e9 * 0.8), rel=0.01)


def test_a_step_costs_the_rooflines_of_its_shares() -> None:
    plan = planner()
    decode = StepPlan([], [SequenceStep([1], 999, []) for _ in range(8)])
    assert plan.seconds(decode) == pytest.approx(plan.tpot(8, 1000), rel=0.01)
    assert plan.seconds(StepPlan([], [SequenceStep(range(500), 0, [])])) == pytest.approx(plan.ttft(500))


def test_what_does_not_fit_or_contradicts_itself_is_said() -> None:
    with pytest.raises(ConfigError, match=r"takes 141.1 GB of weights; h100-80gb has 80 GB"):
        Planner(SHAPES["llama-3.1-70b"], DEVICES["h100-80gb"], 141.1e9)
    with pytest.raises(ConfigError, match="exceed the context of 1000"):
        Load(prompt=900, output=200, spread=0, shared=0, context=1000)
    with pytest.raises(ConfigError, match="longer than the prompt"):
        Load(prompt=900, output=20, spread=0, shared=901, context=1000)


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "num_attention_heads": 32,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "tie_word_embeddings": False, "sliding_window": None,
    },
    "deepseek-v3": {
        "hidden_size": 7168, "intermediate_size": 18432, "max_position_embeddings": 131072, "num_attention_heads": 128,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "vocab_size": 129280, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3, "head_dim": 128, "tie_word_embeddings": False,
    },
    "gemma-3-27b": {
        "text_config": {
            "hidden_size": 5376, "intermediate_size": 21504, "max_position_embeddings": 131072, "sliding_window": 1024,
            "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "head_dim": 128,
            "vocab_size": 262208, "sliding_window_pattern": 6, "tie_word_embeddings": True,
        }
    },
}  # fmt: skip
"""From the published config.json files, what matters here."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_known_shape(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    read, known = shape_from_config(tmp_path), SHAPES[name]
    assert read.parameters == pytest.approx(known.parameters, rel=0.03)
    assert read.active == pytest.approx(known.active, rel=0.06)
    fields = ("layers", "hidden", "heads", "kv_heads", "head_dim", "context", "latent", "window", "windowed_layers")
    for field in fields:
        assert getattr(read, field) == getattr(known, field), field
    assert shape_from_config(tmp_path / "config.json") == read


@pytest.mark.parametrize("page", [8, 16, 64])
@pytest.mark.parametrize("codec", ["fp16", "fp32"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b", "mistral-7b-v0.3"])
def test_as_many_pages_fit_as_a_server_makes(name: str, codec: KvDtype, page: int) -> None:
    shape, memory = SHAPES[name], 3 * GIB + 12_345
    architecture: Architecture = "qwen3" if "qwen3" in name else "mistral" if "mistral" in name else "llama"
    config = ModelConfig(
        architecture, name, 32_000, shape.hidden, 4 * shape.hidden, shape.layers, shape.heads, shape.kv_heads,
        shape.head_dim, 1e-6, shape.context, RopeConfig(),
    )  # fmt: skip
    made = pool_pages(Settings(kv_memory=memory, page_size=page), bytes_per_page(config, page, codec))
    assert Planner(shape, Device("this", 10e9 + memory, 1.0, 1.0), 10e9, FULL).pages(page, codec) == made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be a whole number from 1 to 10,000"),
        ({"vocab_size": True}, "vocab_size must be"),
    ],
)
def test_a_bad_config_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIGS["llama-3.1-8b"], **change}))
    with pytest.raises(ConfigError, match=message):
        shape_from_config(file)


def test_no_config_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read"):
        shape_from_config(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(ConfigError, match="holds no JSON object"):
        shape_from_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        shape_from_config(tmp_path)
