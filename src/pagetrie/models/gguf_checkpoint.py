"""A model in one GGUF file, offered under Hugging Face names and shapes."""

from __future__ import annotations

import math
import re
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pagetrie.errors import ModelLoadError
from pagetrie.models.checkpoint import QuantizedTensor
from pagetrie.models.config import ModelConfig
from pagetrie.models.fingerprint import fingerprint
from pagetrie.models.gguf_config import GgufMetadata, model_config
from pagetrie.models.gguf_file import GgufFile, GgufTensor
from pagetrie.models.gguf_vocabulary import read_vocabulary
from pagetrie.models.layout import check_tensors
from pagetrie.text.gguf_tokenizer import tokenizer_from_gguf
from pagetrie.text.tokenizer import Tokenizer

_Q = GGMLQuantizationType
_QUANTISED = frozenset({_Q.Q8_0, _Q.Q4_0, _Q.Q4_1, _Q.Q5_0, _Q.Q5_1, _Q.Q4_K, _Q.Q6_K})
_FLOATS = {_Q.F32: torch.float32, _Q.F16: torch.float16, _Q.BF16: torch.bfloat16}

_BLOCKS: dict[_Q, Literal["q4_0", "q4_1", "q8_0"]] = {_Q.Q4_0: "q4_0", _Q.Q4_1: "q4_1", _Q.Q8_0: "q8_0"}

_ROW_VALUES = 8192

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


class GgufCheckpoint:
    """See `pagetrie.models.checkpoint.Checkpoint`. Raises ModelLoadError if the file can't be served."""

    def __init__(self, path: Path, cache_dir: Path) -> None:
        self._file = GgufFile(path)
        self._cache_dir = cache_dir
        self._metadata = GgufMetadata(path, self._file.metadata)
        self._metadata.architecture()  # before anything else: tensors of an unknown architecture mean nothing
        self._tensors = {_hf_name(name): tensor for name, tensor in self._file.tensors.items()}
        for tensor in self._file.tensors.values():
            if tensor.type not in _QUANTISED and tensor.type not in _FLOATS:
                supported = ", ".join(sorted(t.name for t in (*_FLOATS, *_QUANTISED)))
                raise ModelLoadError(
                    f"{path}: tensor {tensor.name!r} is stored as {tensor.type.name}, which isn't supported "
                    f"(supported: {supported})"
                )
        self._config = model_config(
            self._metadata, {name: tensor.shape for name, tensor in self._tensors.items()}, self._rope_factors()
        )
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        check_tensors(str(path), self._config, shapes, ignored=(_ROPE_FACTORS, ".attn_rot_embd.weight"))
        self._vocabulary = read_vocabulary(self._metadata)

    @property
    def config(self) -> ModelConfig:
        return self._config

    @cached_property
    def fingerprint(self) -> str:
        tensors = sorted(self._file.tensors.values(), key=lambda tensor: tensor.name)
        return fingerprint([self._file.header], ((self._file.data, t.offset, t.n_bytes) for t in tensors))

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"{self._file.data.path}: tensor {name!r} is missing")
        return self._ordered(name, self._decode(tensor))

    def quantized(self, name: str) -> QuantizedTensor | None:
        tensor = self._tensors.get(name)
        kind = None if tensor is None else _BLOCKS.get(tensor.type)
        if tensor is None or kind is None:
            return None
        raw = torch.from_numpy(self._file.data.read(tensor.offset, tensor.n_bytes))
        blocks = raw.view(*tensor.shape[:-1], -1, GGML_QUANT_SIZES[tensor.type][1])
        return QuantizedTensor(kind, self._ordered(name, blocks))

    def _ordered(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The tensor with its rows in Hugging Face's order."""
        # llama.cpp rotates neighbouring pairs, so its converter interleaves the two halves of each head.
        if self._config.architecture == "llama" and ".self_attn.q_proj." in name:
            return _half_rotation_order(rows, self._config.n_heads)
        if self._config.architecture == "llama" and ".self_attn.k_proj." in name:
            return _half_rotation_order(rows, self._config.n_kv_heads)
        return rows

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf(self._vocabulary, self._cache_dir, vocab_size=self._config.vocab_size)

    def _decode(self, tensor: GgufTensor) -> torch.Tensor:
        raw = self._file.data.read(tensor.offset, tensor.n_bytes)
        dtype = _FLOATS.get(tensor.type)
        if dtype is not None:
            return torch.from_numpy(raw).view(dtype).reshape(tensor.shape)
        # gguf works on 16 rows at a time, so rows of a few thousand values are several times faster than a model's own.
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        per_row = math.gcd(tensor.n_bytes // block_bytes, _ROW_VALUES // block)
        values = dequantize(raw.reshape(-1, per_row * block_bytes), tensor.type)
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(tensor.shape)

    def _rope_factors(self) -> tuple[float, ...] | None:
        tensor = self._file.tensors.get(_ROPE_FACTORS)
        return None if tensor is None else tuple(self._decode(tensor).float().flatten().tolist())


def _hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown name stays as it is."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _BLOCK_NAMES:
        return name
    return f"model.layers.{int(match[1])}.{_BLOCK_NAMES[match[2]]}.{match[3]}"


def _half_rotation_order(values: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Undo the permutation that convert_hf_to_gguf applies to the rows of q and k ([heads * head_dim, ...])."""
    order = torch.arange(len(values)).view(n_heads, -1, 2).transpose(1, 2).flatten()
    return values[order]
