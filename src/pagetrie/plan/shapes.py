"""Shapes of well-known models, and how to read one from a ``config.json``.

The figures are those of the published configurations; parameter counts are those of the model cards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagetrie.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides the size of a model and of its cache.

    Attributes:
        parameters: all of them; ``active``: those that one token passes (fewer with a mixture of experts).
        layers, hidden, heads, kv_heads, head_dim: as usual.
        context: longest sequence, in tokens.
        latent: values per token and layer where keys and values are stored as one latent vector (DeepSeek's MLA: the
            latent and the rotary key); 0 elsewhere.
        window, windowed_layers: layers whose attention reaches only so many tokens back.
    """

    name: str
    parameters: float
    active: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    latent: int = 0
    window: int = 0
    windowed_layers: int = 0

    @property
    def values_per_layer(self) -> int:
        """Values that one token keeps in one layer."""
        return self.latent or 2 * self.kv_heads * self.head_dim

    def values_per_token(self) -> int:
        """Values that one token keeps over all layers, while every window still covers it."""
        return self.layers * self.values_per_layer

    def cached_values(self, tokens: float) -> float:
        """Values that a sequence of ``tokens`` keeps: layers with a window keep no more than the window."""
        full = (self.layers - self.windowed_layers) * tokens
        return (full + self.windowed_layers * min(tokens, self.window)) * self.values_per_layer

    def attention_flops(self, new: float, cached: float) -> float:
        """Floating-point operations of causal attention for ``new`` tokens behind ``cached`` ones.

        Two products (scores and sums) of 2 operations per pair, head and dimension. A latent layer computes as many
        heads over vectors of the latent's width.
        """
        width = self.heads * (self.latent or self.head_dim)
        pairs = new * cached + new * (new + 1) / 2
        windowed = min(pairs, new * self.window) if self.window else pairs
        full_layers = self.layers - self.windowed_layers
        return 4 * width * (full_layers * pairs + self.windowed_layers * windowed)


def _dense(name: str, billions: float, layers: int, hidden: int, heads: int, kv: int, dim: int, context: int) -> Shape:
    return Shape(name, billions * 1e9, billions * 1e9, layers, hidden, heads, kv, dim, context)


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        _dense("smollm2-135m", 0.1345, 30, 576, 9, 3, 64, 8192),
        _dense("llama-3.1-8b", 8.03, 32, 4096, 32, 8, 128, 131_072),
        _dense("llama-3.1-70b", 70.55, 80, 8192, 64, 8, 128, 131_072),
        _dense("llama-3.1-405b", 405.85, 126, 16_384, 128, 8, 128, 131_072),
        _dense("mistral-7b-v0.3", 7.25, 32, 4096, 32, 8, 128, 32_768),
        _dense("mistral-small-24b", 23.57, 40, 5120, 32, 8, 128, 32_768),
        _dense("qwen3-0.6b", 0.596, 28, 1024, 16, 8, 128, 40_960),
        _dense("qwen3-8b", 8.19, 36, 4096, 32, 8, 128, 40_960),
        _dense("qwen3-32b", 32.76, 64, 5120, 64, 8, 128, 40_960),
        Shape("qwen3-30b-a3b", 30.53e9, 3.35e9, 48, 2048, 32, 4, 128, 40_960),
        Shape("qwen3-235b-a22b", 235.09e9, 22.19e9, 94, 4096, 64, 4, 128, 40_960),
        Shape("deepseek-v3", 671.03e9, 37.55e9, 61, 7168, 128, 128, 128, 131_072, latent=512 + 64),
        Shape("gemma-3-4b", 3.88e9, 3.88e9, 34, 2560, 8, 4, 256, 131_072, window=1024, windowed_layers=29),
        Shape("gemma-3-12b", 11.77e9, 11.77e9, 48, 3840, 16, 8, 256, 131_072, window=1024, windowed_layers=40),
        Shape("gemma-3-27b", 27.01e9, 27.01e9, 62, 5376, 32, 16, 128, 131_072, window=1024, windowed_layers=52),
    )
}


def shape_from_config(path: Path) -> Shape:
    """Read a Hugging Face ``config.json``, or that of a folder.

    Counts the parameters from the sizes: embeddings, attention, gated feed-forward layers, experts.

    Raises:
        ConfigError: it can't be read, or a size is missing or out of range; says which.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{file} is no config.json: it has more than {MAX_CONFIG_BYTES:,} bytes")
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return _shape(file.parent.name or "model", str(file), values.get("text_config") or values)


def _shape(name: str, source: str, values: Mapping[str, Any]) -> Shape:
    def size(key: str, default: int | None = None, most: int = 1 << 30) -> int:
        value = values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise ConfigError(f"{source}: {key} must be a whole number from 1 to {most:,}, got {value!r}")
        return value

    def optional(key: str) -> int:
        return size(key) if values.get(key) else 0

    layers, hidden, heads = size("num_hidden_layers", most=10_000), size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    head_dim = size("head_dim", max(hidden // heads, 1))
    inner, vocabulary = size("intermediate_size"), size("vocab_size")
    latent = 0
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    if rank := optional("kv_lora_rank"):
        rotary, plain, value_dim = size("qk_rope_head_dim"), size("qk_nope_head_dim"), size("v_head_dim")
        query_rank = optional("q_lora_rank")
        latent = rank + rotary
        # Queries may pass a bottleneck of their own; keys and values are spread out from the latent.
        query = (query_rank or hidden) * heads * (plain + rotary) + hidden * query_rank
        attention = query + hidden * latent + rank * heads * (plain + value_dim) + heads * value_dim * hidden
    experts = optional("n_routed_experts") or optional("num_experts") or optional("num_local_experts")
    dense = 3 * hidden * inner
    feed_forward = active = float(layers * dense)
    if experts:
        expert = 3 * hidden * size("moe_intermediate_size", inner)
        used = size("num_experts_per_tok")
        shared, first = optional("n_shared_experts"), min(optional("first_k_dense_replace"), layers)
        sparse = layers - first
        feed_forward = first * dense + sparse * ((experts + shared) * expert + hidden * experts)
        active = first * dense + sparse * ((used + shared) * expert + hidden * experts)
    embeddings = vocabulary * hidden * (1 if values.get("tie_word_embeddings") else 2)
    rest = layers * attention + embeddings
    window, windowed = _windows(values, layers)
    return Shape(
        name, feed_forward + rest, active + rest, layers, hidden, heads, kv_heads, head_dim,
        size("max_position_embeddings", 8192), latent, window, windowed,
    )  # fmt: skip


def _windows(values: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """(window, layers that have it): from the list of layer types, a pattern, or a window for all."""
    window = values.get("sliding_window")
    if not isinstance(window, int) or window <= 0 or values.get("use_sliding_window") is False:
        return 0, 0
    kinds = values.get("layer_types")
    if isinstance(kinds, list):
        return window, sum(kind == "sliding_attention" for kind in kinds)
    pattern = values.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 0:
        return window, layers - layers // pattern
    return window, layers
