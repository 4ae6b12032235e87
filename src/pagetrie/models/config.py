"""The shape of a Llama-family decoder, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding, in Hugging Face's terms (``rope_parameters`` / ``rope_scaling``).

    ``freq_factors`` holds per-frequency divisors, head_dim / 2 of them, where a GGUF file ships them instead of the
    llama3 parameters.
    """

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder.

    Attributes:
        max_position: the context the model was trained or scaled for, in tokens.
        qkv_bias: q, k and v projections have a bias (Qwen2; also Llama with attention_bias).
        o_bias: the output projection has one (Llama with attention_bias).
        qk_norm: RMSNorm over each head of q and k before RoPE (Qwen3).
        sliding_window: attention reaches only this far back; None for full attention.
    """

    architecture: Architecture
    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_eps: float
    max_position: int
    rope: RopeConfig
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    def attention_share(self) -> float:
        """Multiply-adds to attend to one position, as a part of those of a token's matrix products."""
        heads = self.n_heads + self.n_kv_heads
        products = self.hidden_size * (2 * heads * self.head_dim + 3 * self.intermediate_size)
        return 2 * self.n_heads * self.head_dim / products

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * bytes_per_value
