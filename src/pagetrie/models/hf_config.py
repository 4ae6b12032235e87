"""From a Hugging Face config.json to a ModelConfig."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

from pagetrie.errors import ModelLoadError
from pagetrie.models.config import Architecture, ModelConfig, RopeConfig

SUPPORTED: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")

# What transformers assumes where config.json is silent, as far as the families differ.
_DEFAULTS: dict[Architecture, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}


class _Values:
    """Typed access to a JSON object. Every getter raises ModelLoadError naming the key."""

    def __init__(self, source: str, values: Mapping[str, Any], defaults: Mapping[str, Any], where: str = "") -> None:
        self.source = source
        self._values = values
        self._defaults = defaults
        self._where = where

    def error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.source}: {message}")

    def get(self, key: str, default: Any = None) -> Any:
        # null means the same as absent, but for sliding_window, which is asked for with `has`.
        value = self._values.get(key)
        return self._defaults.get(key, default) if value is None else value

    def is_null(self, key: str) -> bool:
        return key in self._values and self._values[key] is None

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.error(f"{self._where}{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(f"{self._where}{key} must be an integer between {low} and {high}, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        value = self.get(key, default)
        if value is None:
            raise self.error(f"{self._where}{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(f"{self._where}{key} must be a finite number, got {value!r}")
        if positive and value <= 0:
            raise self.error(f"{self._where}{key} must be greater than 0, got {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{self._where}{key} must be true or false, got {value!r}")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.error(f"{self._where}{key} must be an object, got {value!r}")
        return value


def model_config(source: str, values: Mapping[str, Any], name: str) -> ModelConfig:
    """Read the decoder's sizes and switches.

    Args:
        source: the file, for messages.
        values: the content of config.json.
        name: what to call the model.

    Raises:
        ModelLoadError: a setting is missing, malformed or unsupported.
    """
    architecture = _architecture(source, values)
    config = _Values(source, values, _DEFAULTS[architecture])
    if config.get("quantization_config"):
        method = config.mapping("quantization_config").get("quant_method", "unknown")
        raise config.error(f"quantised weights ({method}) aren't supported in a Hugging Face folder; use a GGUF file")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise config.error(f"hidden_act {activation!r} isn't supported (only silu)")
    if config.flag("mlp_bias"):
        raise config.error("mlp_bias isn't supported")
    hidden, n_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    n_kv_heads = config.integer("num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise config.error(f"{n_heads} query heads can't share {n_kv_heads} key/value heads")
    if config.get("head_dim") is None and hidden % n_heads:
        raise config.error(f"hidden_size {hidden} isn't a multiple of num_attention_heads {n_heads}")
    head_dim = config.integer("head_dim", hidden // n_heads or None)
    if head_dim % 2:
        raise config.error(f"head_dim must be even, got {head_dim}")
    n_layers = config.integer("num_hidden_layers", high=10_000)
    trained_positions = config.integer("max_position_embeddings")
    rope = _rope(config, trained_positions)
    # With YaRN some configurations give the context before scaling.
    scaled = int(rope.original_max_position * rope.factor) if rope.kind == "yarn" else 0
    max_position = max(trained_positions, scaled)
    window = _sliding_window(config, architecture, n_layers)
    attention_bias = config.flag("attention_bias")
    return ModelConfig(
        architecture=architecture,
        name=name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rms_eps=config.number("rms_norm_eps", 1e-6),
        max_position=max_position,
        rope=rope,
        tie_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=architecture == "qwen2" or (attention_bias and architecture != "mistral"),
        o_bias=attention_bias and architecture in ("llama", "qwen3"),
        qk_norm=architecture == "qwen3",
        sliding_window=window if window is not None and window < max_position else None,
    )


def _architecture(source: str, values: Mapping[str, Any]) -> Architecture:
    listed = values.get("architectures")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    for name in names:
        if name in SUPPORTED:
            return SUPPORTED[name]
    found = ", ".join(names) or f"model_type {values.get('model_type')!r}"
    raise ModelLoadError(f"{source}: architecture {found} isn't supported (supported: {', '.join(SUPPORTED)})")


def _rope(config: _Values, max_position: int) -> RopeConfig:
    """Both forms: rope_parameters (transformers 5) and rope_theta with rope_scaling (before)."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    values = config.mapping(key)
    if values and all(isinstance(value, dict) for value in values.values()):
        raise config.error(f"{key} differs between layers, which isn't supported")
    rope = _Values(config.source, values, {}, f"{key}.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise config.error(f"rope type {kind!r} isn't supported (supported: {', '.join(_ROPE_KINDS)})")
    for holder in (config, rope):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise config.error("partial_rotary_factor isn't supported")
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    original = "original_max_position_embeddings"
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise config.error(f"{key}.high_freq_factor ({high}) must be greater than low_freq_factor ({low})")
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=rope.number("factor"),
            original_max_position=rope.integer(original, config.get(original)),
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return RopeConfig(
        kind=cast('Literal["linear", "yarn"]', kind),
        theta=theta,
        factor=rope.number("factor"),
        original_max_position=rope.integer(original, config.get(original, max_position)),
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _sliding_window(config: _Values, architecture: Architecture, n_layers: int) -> int | None:
    """The window of all layers, or None. Raises ModelLoadError if only some layers have one."""
    if architecture == "llama" or config.is_null("sliding_window"):
        return None
    if architecture != "mistral" and not config.flag("use_sliding_window"):
        return None
    window = config.integer("sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.integer("max_window_layers", 28, low=0) if architecture != "mistral" else 0
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(n_layers)]
    if not isinstance(kinds, list) or len(kinds) != n_layers:
        raise config.error(f"layer_types must list {n_layers} layers")
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        raise config.error("a sliding window in some layers only isn't supported")
    return window
