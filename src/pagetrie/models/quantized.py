"""A decoder over weights of 8 or 4 bits, its whole forward pass in one native call.

Weights are integers in groups of 32 along the inputs, with an fp16 scale per group; activations are quantised alike,
per row, as they come. So products are sums of integers, and a decode step reads a half (q8) or nearly a third (q4)
of what fp16 takes.

- ``q8``: tensors that a GGUF file stores as Q8_0 are used as they are, all others are rounded to 8 bits.
- ``q4``: tensors stored as Q4_0 or Q4_1 are used as they are too, in 4 bits; the others go as with ``q8``. Nothing is
  rounded to 4 bits here: with a file that holds none, ``q4`` is ``q8``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch  # before the extension, so that both use one OpenMP runtime

from pagetrie import _native
from pagetrie.errors import ModelLoadError
from pagetrie.models.linear import QuantizedWeights
from pagetrie.models.rope import RotaryEmbedding, interleave_halves

if TYPE_CHECKING:
    from pagetrie.models.checkpoint import Checkpoint
    from pagetrie.models.config import ModelConfig

_PANEL = 16
"""Rows of the gate that alternate with rows of the up projection, so that one thread has both sides of SwiGLU."""


class QuantizedDecoder:
    """The counterpart of ``models.decoder.Decoder`` for quantised weights; attention is part of it.

    A row's result does not depend on the rows beside it, nor on the number of threads.

    Args:
        checkpoint: where the tensors come from.
        weights: how to hold them.

    Attributes:
        weight_bytes: bytes of weights that a step reads: every layer's, and the head's.

    Raises:
        ModelLoadError: a tensor is missing, has the wrong shape, or holds what fp16 scales can't reach.
    """

    def __init__(self, checkpoint: Checkpoint, weights: QuantizedWeights) -> None:
        config = self.config = checkpoint.config
        self._rope = RotaryEmbedding(config.rope, config.head_dim)
        load = _Loader(checkpoint, weights)
        tied = config.tie_embeddings or not checkpoint.has_tensor("lm_head.weight")
        embedding = load.matrix(["model.embed_tokens"])
        head = embedding if tied else load.matrix(["lm_head"])
        self.weight_bytes = head.nbytes
        self._native = _native.QuantizedDecoder(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.n_heads,
            kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            rms_eps=config.rms_eps,
            embedding=embedding,
            head=head,
            final_norm=load.vector("model.norm.weight"),
        )
        for index in range(config.n_layers):
            prefix = f"model.layers.{index}."
            attention = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
            matrices = {
                "qkv": load.matrix(attention, biased=config.qkv_bias, rotated=2),
                "output": load.matrix([prefix + "self_attn.o_proj"], biased=config.o_bias),
                "gate_up": load.matrix([prefix + "mlp.gate_proj", prefix + "mlp.up_proj"], alternating=True),
                "down": load.matrix([prefix + "mlp.down_proj"]),
            }
            self._native.add_layer(
                attention_norm=load.vector(prefix + "input_layernorm.weight"),
                head_norm=load.head_norms(prefix) if config.qk_norm else torch.empty(0),
                mlp_norm=load.vector(prefix + "post_attention_layernorm.weight"),
                **matrices,
            )
            self.weight_bytes += sum(matrix.nbytes for matrix in matrices.values())

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        end: int,
        plan: _native.AttentionPlan,
        pages: _native.KvPages,
    ) -> torch.Tensor:
        """Run all layers over the tokens of a step; their keys and values go to the pages.

        Args:
            token_ids: int64 [tokens].
            positions: int64 [tokens], each token's position in its own sequence.
            end: more than every position.
            plan: who attends to what.
            pages: where keys and values are.

        Returns:
            float32 [tokens, hidden_size], before the final norm (``logits`` applies it).
        """
        hidden = torch.empty(len(token_ids), self.config.hidden_size)
        rotations = torch.view_as_real(self._rope.rotations(positions, end)).view(len(token_ids), -1)
        self._native.forward(plan, pages, token_ids, rotations, hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits, float32 [rows, vocab_size], of rows of ``forward``'s result."""
        out = torch.empty(len(hidden), self.config.vocab_size)
        self._native.logits(hidden.contiguous(), out)
        return out


class _Loader:
    """Packs a checkpoint's tensors, one matrix at a time."""

    def __init__(self, checkpoint: Checkpoint, weights: QuantizedWeights) -> None:
        self._checkpoint = checkpoint
        self._head_dim = checkpoint.config.head_dim
        self._types = ("q8_0",) if weights == "q8" else ("q8_0", "q4_0", "q4_1")

    def vector(self, name: str) -> torch.Tensor:
        return self._checkpoint.tensor(name).float().contiguous()

    def head_norms(self, prefix: str) -> torch.Tensor:
        """The norm weights of q's and k's heads, [n_heads + n_kv_heads, head_dim]."""
        config: ModelConfig = self._checkpoint.config
        q, k = (
            interleave_halves(self.vector(f"{prefix}self_attn.{name}_norm.weight"), self._head_dim) for name in "qk"
        )
        return torch.cat((q.expand(config.n_heads, -1), k.expand(config.n_kv_heads, -1))).contiguous()

    def matrix(
        self, parts: list[str], *, biased: bool = False, rotated: int = 0, alternating: bool = False
    ) -> _native.QuantizedMatrix:
        """Stack the parts into one matrix.

        Args:
            parts: the names, without their last part (``.weight``).
            biased: the parts have biases.
            rotated: how many of the first parts take part in RoPE.
            alternating: let the (two) parts take turns, ``_PANEL`` rows at a time, each filled up with rows of zeros.
        """

        def stack(tensors: list[torch.Tensor]) -> torch.Tensor:
            if alternating:
                tensors = [_whole_panels(tensor) for tensor in tensors]
            rows = torch.cat(tensors) if len(tensors) > 1 else tensors[0].contiguous()
            if not (rotated or alternating):
                return rows
            # The order of rows as numbers first: then each row moves once, and as a whole.
            order = list(torch.split(torch.arange(len(rows)), [len(tensor) for tensor in tensors]))
            order[:rotated] = [interleave_halves(part, self._head_dim) for part in order[:rotated]]
            if alternating:
                return rows[torch.stack([part.view(-1, _PANEL) for part in order], 1).flatten()]
            return rows[torch.cat(order)]

        bias = stack([self.vector(f"{part}.bias") for part in parts]) if biased else None
        stored = [self._checkpoint.quantized(f"{part}.weight") for part in parts]
        try:
            kind = stored[0].type if stored[0] is not None else ""
            blocks = [t.blocks for t in stored if t is not None and t.type == kind]
            if kind in self._types and len(blocks) == len(parts):
                return _native.QuantizedMatrix.from_blocks(stack(blocks), kind, bias)
            floats = [self._checkpoint.tensor(f"{part}.weight").float() for part in parts]
            return _native.QuantizedMatrix.from_floats(stack(floats), bias)
        except ValueError as error:
            raise ModelLoadError(f"{' + '.join(parts)} can't be quantised: {error}; load it as fp32") from error


def _whole_panels(rows: torch.Tensor) -> torch.Tensor:
    """The rows, filled up with zeros to whole panels."""
    missing = -len(rows) % _PANEL
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows
