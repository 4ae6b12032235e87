"""The forward pass of a Llama-family decoder: Llama, Mistral, Qwen2 (biases) and Qwen3 (norms on q and k).

Activations are fp32. Attention is handed in, so this file knows nothing of pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F

from pagetrie.models.linear import FloatWeights, Linear, check_fp16_range, pack_linear
from pagetrie.models.rope import RotaryEmbedding, interleave_halves, rotate

if TYPE_CHECKING:
    from pagetrie.models.checkpoint import Checkpoint
    from pagetrie.models.config import ModelConfig

Attend: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(layer, q, kv)``: store the new keys and values, then attend.

q is float32 [tokens, n_heads, head_dim]; kv is float32 [tokens, 2, n_kv_heads, head_dim] (keys, then values); both
are views that may be changed. Returns float32 [tokens, n_heads * head_dim], contiguous.
"""


@dataclass(slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A model's weights, packed for compute, and its forward pass.

    Weights are read and packed one matrix at a time, so loading never holds the model twice. With tied embeddings
    the table is kept once for look-up and once packed for the product.

    Args:
        checkpoint: where the tensors come from.
        weights: type of the packed matrices and of the embedding table; norms and biases are fp32.

    Raises:
        ModelLoadError: a tensor is missing, has the wrong shape or doesn't fit fp16.
        ConfigError: fp16 weights on a machine without FBGEMM.
    """

    def __init__(self, checkpoint: Checkpoint, weights: FloatWeights = "fp16") -> None:
        self.config = checkpoint.config
        self._rope = RotaryEmbedding(self.config.rope, self.config.head_dim)
        embedding = checkpoint.tensor("model.embed_tokens.weight")
        if weights == "fp16":
            check_fp16_range(embedding, "model.embed_tokens.weight")
        self._embedding = embedding.to(torch.float16 if weights == "fp16" else torch.float32)
        self._layers = [_load_layer(checkpoint, index, weights) for index in range(self.config.n_layers)]
        self._final_norm = checkpoint.tensor("model.norm.weight").float()
        tied = self.config.tie_embeddings or not checkpoint.has_tensor("lm_head.weight")
        head = embedding if tied else checkpoint.tensor("lm_head.weight")
        self._head = pack_linear(head, None, weights, "lm_head.weight")

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, end: int, attend: Attend) -> torch.Tensor:
        """Run all layers over the tokens of a step.

        Args:
            token_ids: int64 [tokens].
            positions: int64 [tokens], each token's position in its own sequence.
            end: more than every position.
            attend: attention over what is stored and what is new.

        Returns:
            float32 [tokens, hidden_size], before the final norm (``logits`` applies it).
        """
        config = self.config
        q_heads, kv_heads, head_dim, eps = config.n_heads, config.n_kv_heads, config.head_dim, config.rms_eps
        q_size = q_heads * head_dim
        width = (config.hidden_size,)
        rotations = self._rope.rotations(positions, end)
        x = F.embedding(token_ids, self._embedding).float()
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(F.rms_norm(x, width, layer.attention_norm, eps)).view(len(x), -1, head_dim)
            qk = qkv[:, : q_heads + kv_heads]
            if layer.qk_norm is not None:
                qk.copy_(F.rms_norm(qk, (head_dim,), None, eps).mul_(layer.qk_norm))
            rotate(qk, rotations)
            mixed = attend(index, qkv[:, :q_heads], qkv[:, q_heads:].view(len(x), 2, kv_heads, head_dim))
            x += layer.output(mixed.view(-1, q_size))
            gate, up = layer.gate_up(F.rms_norm(x, width, layer.mlp_norm, eps)).chunk(2, dim=-1)
            x += layer.down(F.silu(gate).mul_(up))
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits, float32 [rows, vocab_size], of rows of ``forward``'s result."""
        return self._head(F.rms_norm(hidden, (self.config.hidden_size,), self._final_norm, self.config.rms_eps))


def _load_layer(checkpoint: Checkpoint, index: int, weights: FloatWeights) -> _Layer:
    config = checkpoint.config
    prefix = f"model.layers.{index}."
    tensor, head_dim = checkpoint.tensor, config.head_dim

    def pack(name: str, parts: list[str], biased: bool, rotated: int = 0) -> Linear:
        """Stack the parts into one matrix; the first ``rotated`` of them take part in RoPE."""

        def stack(kind: str) -> torch.Tensor:
            rows = [tensor(f"{prefix}{part}.{kind}").float() for part in parts]
            rows = [interleave_halves(r, head_dim) if i < rotated else r for i, r in enumerate(rows)]
            return rows[0] if len(rows) == 1 else torch.cat(rows)

        return pack_linear(stack("weight"), stack("bias") if biased else None, weights, prefix + name)

    attention = [f"self_attn.{name}_proj" for name in "qkv"]
    return _Layer(
        attention_norm=tensor(prefix + "input_layernorm.weight").float(),
        qkv=pack("self_attn.qkv", attention, config.qkv_bias, rotated=2),
        qk_norm=_head_norms(checkpoint, prefix, config) if config.qk_norm else None,
        output=pack("self_attn.o_proj", ["self_attn.o_proj"], config.o_bias),
        mlp_norm=tensor(prefix + "post_attention_layernorm.weight").float(),
        gate_up=pack("mlp.gate_up", ["mlp.gate_proj", "mlp.up_proj"], biased=False),
        down=pack("mlp.down_proj", ["mlp.down_proj"], biased=False),
    )


def _head_norms(checkpoint: Checkpoint, prefix: str, config: ModelConfig) -> torch.Tensor:
    """The norm weights of q's and k's heads as one factor, float32 [n_heads + n_kv_heads, head_dim]."""
    norms = (checkpoint.tensor(f"{prefix}self_attn.{name}_norm.weight").float() for name in "qk")
    q, k = (interleave_halves(norm, config.head_dim) for norm in norms)
    return torch.cat((q.expand(config.n_heads, -1), k.expand(config.n_kv_heads, -1)))
