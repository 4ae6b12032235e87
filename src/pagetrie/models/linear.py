"""Matrix products with packed weights.

Weights are fp16 by default, through FBGEMM's packed GEMM: activations and sums stay fp32, only the stored weights
are halved, and each is widened as it is used. Models published in fp16 or bf16 within fp16's range lose nothing
that shows (KL to fp32 about 1e-6 on SmolLM2-135M), and a decode step reads half the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F

from pagetrie.errors import ConfigError, ModelLoadError

FloatWeights: TypeAlias = Literal["fp16", "fp32"]
QuantizedWeights: TypeAlias = Literal["q8", "q4"]
"""See ``models.quantized``."""
WeightDtype: TypeAlias = Literal["fp16", "fp32", "q8", "q4"]
Linear: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""``x`` float32 [rows, in_features], rows >= 1  ->  float32 [rows, out_features]."""


def check_fp16_range(weight: torch.Tensor, name: str) -> None:
    """Refuse values that fp16 can't hold, rather than let them become infinite or be cut off unseen.

    Args:
        weight: any float tensor.
        name: what to call it in the message.

    Raises:
        ModelLoadError: a value is beyond fp16's range (65504), infinite or not a number.
    """
    low, high = (float(bound) for bound in torch.aminmax(weight))
    limit = torch.finfo(torch.float16).max
    if not (-limit <= low and high <= limit):
        raise ModelLoadError(
            f"{name} holds values from {low:g} to {high:g}, fp16 holds at most {limit:g} in size; load it as fp32"
        )


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None, dtype: FloatWeights, name: str) -> Linear:
    """Make the product ``x @ weight.T + bias``.

    Args:
        weight: [out_features, in_features], any float type; not needed afterwards.
        bias: [out_features] or None; kept in fp32.
        dtype: how to hold the weights.
        name: what to call the matrix in an error.

    Raises:
        ModelLoadError: a weight is beyond fp16's range.
        ConfigError: fp16 weights on a machine that FBGEMM has no kernels for.
    """
    weight = weight.to(torch.float32).contiguous()
    bias = None if bias is None else bias.to(torch.float32).contiguous()
    if dtype == "fp32":
        return lambda x: F.linear(x, weight, bias)
    check_fp16_range(weight, name)
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise ConfigError("fp16 weights need FBGEMM (an x86 CPU with AVX2), which this torch lacks; use fp32 weights")
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    product = torch.ops.quantized.linear_dynamic_fp16.default

    def fp16_linear(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = product(x, packed)
        return result

    return fp16_linear
