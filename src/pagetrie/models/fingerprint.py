"""A digest that tells two sets of weights apart without reading them all."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from pagetrie.models.data_file import DataFile

_SLICE = 4096
_SLICES = 4


def fingerprint(descriptions: Iterable[bytes], tensors: Iterable[tuple[DataFile, int, int]]) -> str:
    """BLAKE3, in hex, over what describes the model and samples of its weights.

    Args:
        descriptions: the bytes that hold names, shapes, types and settings (a GGUF header; config.json and the
            safetensors headers).
        tensors: (file, offset, size in bytes) of each tensor, in a fixed order.

    A tensor of up to 16 KiB counts whole, of a larger one four slices of 4 KiB, spread evenly from its first to its
    last byte: training moves nearly every value, so a retrained tensor differs in them. Every part is framed by its
    length. Reads at most 16 KiB per tensor, whatever its size. Raises ModelLoadError.
    """
    digest = blake3(b"pagetrie model fingerprint 1")
    for description in descriptions:
        digest.update(len(description).to_bytes(8, "little"))
        digest.update(description)
    for file, offset, size in tensors:
        digest.update(size.to_bytes(8, "little"))
        if size <= _SLICE * _SLICES:
            digest.update(file.read(offset, size).data)
        else:
            for index in range(_SLICES):
                digest.update(file.read(offset + (size - _SLICE) * index // (_SLICES - 1), _SLICE).data)
    return digest.hexdigest()
