"""Reading a safetensors file: its header, checked against the file, and raw tensors on demand.

Format: 8 bytes with the header's length (little-endian), a JSON header, then the tensors' bytes without gaps.
https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagetrie.errors import ModelLoadError
from pagetrie.models.data_file import DataFile

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of the header. ``offset`` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class SafetensorsFile:
    """An opened file: ``tensors`` by name; bytes on demand.

    Raises ModelLoadError if the file can't be read, isn't safetensors, or is truncated or corrupt. Tensors of types
    outside `DTYPES` are listed, but can't be read.

    Attributes:
        data: the file, for the tensors' bytes.
        header: the bytes of the JSON header.
    """

    def __init__(self, path: Path) -> None:
        self.data = DataFile(path)
        size = self.data.size
        if size < 10:
            raise self._error(f"{size} bytes are too few for a safetensors file")
        length = int.from_bytes(self.data.read(0, 8).tobytes(), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise self._error(
                f"not a safetensors file, or truncated: the header's length is given as {length} bytes, "
                f"the file has {size}"
            )
        self.header = self.data.read(8, length).tobytes()
        try:
            entries = json.loads(self.header)
        except (ValueError, RecursionError) as error:
            raise self._error("the header isn't JSON (not a safetensors file, or corrupt)") from error
        if not isinstance(entries, dict):
            raise self._error("the header isn't a JSON object (corrupt)")
        self.tensors = {
            name: self._entry(name, entry, 8 + length) for name, entry in entries.items() if name != "__metadata__"
        }

    def _error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.data.path}: {message}")

    def _entry(self, name: str, entry: Any, data_start: int) -> StoredTensor:
        try:
            dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            numbers = (*shape, start, end)
            if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in numbers):
                raise ValueError
        except (KeyError, TypeError, ValueError) as error:
            raise self._error(f"tensor {name!r} has a malformed header entry (corrupt)") from error
        if end < start or data_start + end > self.data.size:
            raise self._error(
                f"tensor {name!r} takes bytes {data_start + start} to {data_start + end}, "
                f"but the file has {self.data.size} (truncated or corrupt)"
            )
        if dtype in DTYPES:
            expected = DTYPES[dtype].itemsize
            for size in shape:
                expected *= size
            if end - start != expected:
                raise self._error(f"tensor {name!r} has {end - start} bytes, its shape needs {expected} (corrupt)")
        return StoredTensor(name, dtype, shape, data_start + start, end - start)

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """A tensor in its stored float type, as a copy of its own. Raises ModelLoadError."""
        raw = self.data.read(tensor.offset, tensor.n_bytes)
        return torch.from_numpy(raw).view(DTYPES[tensor.dtype]).reshape(tensor.shape)
