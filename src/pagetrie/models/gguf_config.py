"""From GGUF metadata to a ModelConfig."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

from pagetrie.errors import ModelLoadError
from pagetrie.models.config import Architecture, ModelConfig, RopeConfig
from pagetrie.models.gguf_file import GgufArray, MetadataValue

# GGUF calls Mistral's and SmolLM's decoder "llama" as well.
SUPPORTED = ("llama", "qwen2", "qwen3")


class GgufMetadata:
    """Typed access to a GGUF file's metadata. Every getter raises ModelLoadError naming the key."""

    def __init__(self, path: Path, values: Mapping[str, MetadataValue]) -> None:
        self.path = path
        self._values = values

    def error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {message}")

    def architecture(self) -> str:
        """The value of general.architecture, if supported."""
        name = self.text("general.architecture")
        if name not in SUPPORTED:
            raise self.error(f"architecture {name!r} isn't supported (supported: {', '.join(SUPPORTED)})")
        return name

    def text(self, key: str, default: str | None = None) -> str:
        value = self._values.get(key, default)
        if value is None:
            raise self.error(f"metadata key {key!r} is missing")
        if not isinstance(value, str):
            raise self.error(f"metadata key {key!r} must be a string, got {_shown(value)}")
        return value

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self._values.get(key, default)
        if value is None:
            raise self.error(f"metadata key {key!r} is missing")
        if isinstance(value, GgufArray) and value.count:
            # Some converters list one value per layer; all alike is the same as one.
            items = set(value.numbers()) if value.item_type.name != "STRING" else set()
            if len(items) > 1:
                raise self.error(f"metadata key {key!r} differs from layer to layer, which isn't supported")
            value = next(iter(items), value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"metadata key {key!r} must be an integer, got {_shown(value)}")
        if not low <= value <= high:
            raise self.error(f"metadata key {key!r} must be between {low} and {high}, got {value}")
        return value

    def optional_integer(self, key: str, *, low: int = 0) -> int | None:
        return self.integer(key, low=low) if key in self._values else None

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key, default)
        if value is None:
            raise self.error(f"metadata key {key!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(f"metadata key {key!r} must be a finite number, got {_shown(value)}")
        return float(value)

    def flag(self, key: str) -> bool | None:
        value = self._values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"metadata key {key!r} must be a boolean, got {_shown(value)}")
        return value

    def array(self, key: str) -> GgufArray | None:
        value = self._values.get(key)
        if value is not None and not isinstance(value, GgufArray):
            raise self.error(f"metadata key {key!r} must be an array, got {_shown(value)}")
        return value

    def has(self, key: str) -> bool:
        return key in self._values


def model_config(
    metadata: GgufMetadata, shapes: Mapping[str, tuple[int, ...]], rope_factors: tuple[float, ...] | None
) -> ModelConfig:
    """Read the decoder's sizes; ``shapes`` (by Hugging Face name) settle what GGUF leaves to the tensors.

    Raises ModelLoadError for a missing, malformed or unsupported setting.
    """
    architecture = metadata.architecture()
    if metadata.optional_integer(f"{architecture}.expert_count"):
        raise metadata.error("mixture-of-experts models aren't supported")
    hidden = metadata.integer(f"{architecture}.embedding_length")
    n_heads = metadata.integer(f"{architecture}.attention.head_count")
    n_kv_heads = metadata.integer(f"{architecture}.attention.head_count_kv", n_heads)
    if n_heads % n_kv_heads:
        raise metadata.error(f"{n_heads} query heads can't share {n_kv_heads} key/value heads")
    key_length = f"{architecture}.attention.key_length"
    if not metadata.has(key_length) and hidden % n_heads:
        raise metadata.error(f"embedding length {hidden} isn't a multiple of {n_heads} heads")
    head_dim = metadata.integer(key_length, hidden // n_heads or None)
    value_length = metadata.integer(f"{architecture}.attention.value_length", head_dim)
    rotary = metadata.integer(f"{architecture}.rope.dimension_count", head_dim)
    if head_dim % 2 or value_length != head_dim or rotary != head_dim:
        raise metadata.error(
            f"head sizes must be equal and even, got key {head_dim}, value {value_length}, rotary {rotary}"
        )
    embedding = shapes.get("model.embed_tokens.weight")
    if embedding is None:
        raise metadata.error("tensor 'token_embd.weight' is missing")
    max_position = metadata.integer(f"{architecture}.context_length")
    window = metadata.optional_integer(f"{architecture}.attention.sliding_window")
    layer0 = "model.layers.0.self_attn."
    return ModelConfig(
        architecture=cast("Architecture", architecture),
        name=metadata.text("general.name", architecture),
        vocab_size=embedding[0],
        hidden_size=hidden,
        intermediate_size=metadata.integer(f"{architecture}.feed_forward_length"),
        n_layers=metadata.integer(f"{architecture}.block_count", high=10_000),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rms_eps=metadata.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        max_position=max_position,
        rope=_rope(metadata, architecture, head_dim, max_position, rope_factors),
        tie_embeddings="lm_head.weight" not in shapes,
        qkv_bias=architecture == "qwen2" or layer0 + "q_proj.bias" in shapes,
        o_bias=layer0 + "o_proj.bias" in shapes,
        qk_norm=architecture == "qwen3",
        sliding_window=window if window and window < max_position else None,
    )


def _rope(
    metadata: GgufMetadata, architecture: str, head_dim: int, max_position: int, factors: tuple[float, ...] | None
) -> RopeConfig:
    if factors is not None and (len(factors) != head_dim // 2 or not all(math.isfinite(f) and f > 0 for f in factors)):
        raise metadata.error(f"tensor 'rope_freqs.weight' must hold {head_dim // 2} positive factors")
    scaling = f"{architecture}.rope.scaling."
    theta = metadata.number(f"{architecture}.rope.freq_base", 10000.0)
    # Files from before rope.scaling.* have scale_linear alone.
    old_factor = metadata.number(f"{architecture}.rope.scale_linear", 1.0)
    kind = metadata.text(scaling + "type", "linear" if old_factor != 1.0 else "none")
    factor = metadata.number(scaling + "factor", old_factor)
    if theta <= 0 or (kind != "none" and factor <= 0):
        raise metadata.error(f"rope base {theta} and factor {factor} must be greater than 0")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta=theta, freq_factors=factors)
    if kind not in ("linear", "yarn"):
        raise metadata.error(f"rope scaling {kind!r} isn't supported (supported: none, linear, yarn)")
    attention_factor = None
    if kind == "yarn" and metadata.has(scaling + "attn_factor"):
        # llama.cpp multiplies YaRN's own factor by this one; Hugging Face's attention_factor is the product.
        attention_factor = metadata.number(scaling + "attn_factor") * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return RopeConfig(
        kind=cast('Literal["linear", "yarn"]', kind),
        theta=theta,
        factor=factor,
        original_max_position=metadata.integer(scaling + "original_context_length", max_position),
        attention_factor=attention_factor,
        beta_fast=metadata.number(scaling + "yarn_beta_fast", 32.0),
        beta_slow=metadata.number(scaling + "yarn_beta_slow", 1.0),
        freq_factors=factors,
    )


def _shown(value: object) -> str:
    if isinstance(value, GgufArray):
        return f"an array of {value.count} {value.item_type.name}"
    return repr(value)[:80]
