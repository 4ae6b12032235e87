"""Rotary position embedding (RoPE, Su et al. 2021) and the scalings that stretch its context.

Formulas follow ``transformers.modeling_rope_utils``, so that the angles agree to the last bit of fp32.
Here a head's rotated pairs lie side by side, ``(x0, x1), (x2, x3), ...``, not half a head apart as in Hugging Face's
order: then a rotation is one complex product in place. The decoder reorders the rows of the q and k projections to
match (``interleave_halves``); attention scores don't change when q and k are reordered alike.
"""

from __future__ import annotations

import math

import torch

from pagetrie.models.config import RopeConfig


def interleave_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the first axis from Hugging Face's half-rotation order to adjacent pairs, head by head.

    Args:
        rows: [n_heads * head_dim, ...].
        head_dim: values per head, even.
    """
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians per position for each pair, fp32 [head_dim / 2], and the factor on cosines and sines.

    ``freq_factors``, where a GGUF file has them, divide the frequencies before any other scaling (as llama.cpp does).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / (config.theta**exponents)
    if config.freq_factors is not None:
        inv_freq = inv_freq / torch.tensor(config.freq_factors, dtype=torch.float32)
    if config.kind == "linear":
        return inv_freq / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(inv_freq, config), 1.0
    if config.kind == "yarn":
        return _yarn(inv_freq, config, head_dim)
    return inv_freq, 1.0


def _llama3(inv_freq: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    wavelength = 2 * math.pi / inv_freq
    low_wavelength = config.original_max_position / config.low_freq_factor
    high_wavelength = config.original_max_position / config.high_freq_factor
    smooth = (config.original_max_position / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blended = (1 - smooth) * inv_freq / config.factor + smooth * inv_freq
    stretched = torch.where(wavelength > low_wavelength, inv_freq / config.factor, inv_freq)
    between = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(between, blended, stretched)


def _yarn(inv_freq: torch.Tensor, config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023): a ramp over the pairs from kept to stretched frequencies, and sharper attention."""

    def pair_with_rotations(rotations: float) -> float:
        return (head_dim * math.log(config.original_max_position / (rotations * 2 * math.pi))) / (
            2 * math.log(config.theta)
        )

    low, high = pair_with_rotations(config.beta_fast), pair_with_rotations(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    scaled = inv_freq / config.factor * ramp + inv_freq * (1 - ramp)

    def mscale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        attention_factor = config.attention_factor
    elif config.mscale and config.mscale_all_dim:
        attention_factor = mscale(config.mscale) / mscale(config.mscale_all_dim)
    else:
        attention_factor = mscale(1.0)
    return scaled, attention_factor


class RotaryEmbedding:
    """Rotations by position, computed once and kept; the table grows with the longest position seen."""

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        self._inv_freq, self._scale = inverse_frequencies(config, head_dim)
        self._table = torch.empty(0, head_dim // 2, dtype=torch.complex64)

    def rotations(self, positions: torch.Tensor, end: int) -> torch.Tensor:
        """The rotations of some positions.

        Args:
            positions: int64 [tokens].
            end: more than every position.

        Returns:
            complex64 [tokens, 1, head_dim / 2], to multiply heads with (``rotate``).
        """
        if end > len(self._table):
            size = max(2048, 1 << (end - 1).bit_length())
            angles = torch.outer(torch.arange(size, dtype=torch.float32), self._inv_freq)
            self._table = torch.complex(angles.cos() * self._scale, angles.sin() * self._scale)
        return self._table[positions].unsqueeze(1)


def rotate(heads: torch.Tensor, rotations: torch.Tensor) -> None:
    """Rotate q or k in place.

    Args:
        heads: float32 [tokens, heads, head_dim], pairs side by side, the last axis contiguous.
        rotations: from ``RotaryEmbedding.rotations``.
    """
    torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2)).mul_(rotations)
