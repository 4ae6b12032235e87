"""What a loaded model file offers, before any of it is packed for compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from pagetrie.models.config import ModelConfig
from pagetrie.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix in a GGUF file's own blocks.

    Attributes:
        type: the blocks' type.
        blocks: uint8 [out_features, in_features / 32, bytes of a block].
    """

    type: Literal["q4_0", "q4_1", "q8_0"]
    blocks: torch.Tensor


class Checkpoint(Protocol):
    """An opened GGUF file or Hugging Face folder.

    Tensors go by their Hugging Face names (``model.embed_tokens.weight``, ``model.layers.0.self_attn.q_proj.weight``,
    ``model.norm.weight``, ``lm_head.weight``, ...) and shapes ([out, in] for projections), with q and k in
    the half-rotation order that Hugging Face uses. They are read when asked for, so that packing one layer at a time
    never holds the whole model twice.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def fingerprint(self) -> str:
        """Hex digest that changes whenever the weights, the shape or the rope change. Cheap: it doesn't read it all."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """The named tensor as float32 (or in its stored float type). Raises ModelLoadError if absent or malformed."""
        ...

    def has_tensor(self, name: str) -> bool: ...

    def quantized(self, name: str) -> QuantizedTensor | None:
        """The named tensor in the blocks it is stored in, its rows in the order of ``tensor``.

        None if it is absent, or stored in another type than those that can be computed with as they are. Raises
        ModelLoadError if it can't be read.
        """
        ...

    def tokenizer(self) -> Tokenizer:
        """Build (or load from the cache folder) the tokenizer."""
        ...
