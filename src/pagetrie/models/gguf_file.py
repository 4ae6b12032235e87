"""Reading a GGUF container: metadata, tensor table and raw tensor bytes.

The ``gguf`` package's own GGUFReader makes several numpy arrays per vocabulary entry and takes seconds on a file with a
vocabulary of 50,000 tokens; it also trusts the lengths it finds. This reader walks the header once, checks every length
against the file before it uses it, and leaves arrays undecoded until somebody asks.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pagetrie.errors import ModelLoadError
from pagetrie.models.data_file import DataFile

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4


class _ValueType(IntEnum):
    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_SCALARS: dict[_ValueType, struct.Struct] = {
    _ValueType.UINT8: struct.Struct("<B"),
    _ValueType.INT8: struct.Struct("<b"),
    _ValueType.UINT16: struct.Struct("<H"),
    _ValueType.INT16: struct.Struct("<h"),
    _ValueType.UINT32: struct.Struct("<I"),
    _ValueType.INT32: struct.Struct("<i"),
    _ValueType.FLOAT32: struct.Struct("<f"),
    _ValueType.BOOL: struct.Struct("<?"),
    _ValueType.UINT64: struct.Struct("<Q"),
    _ValueType.INT64: struct.Struct("<q"),
    _ValueType.FLOAT64: struct.Struct("<d"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array in the metadata, still encoded: ``count`` items of ``item_type`` in ``raw``."""

    item_type: _ValueType
    count: int
    raw: memoryview

    def strings(self) -> list[str]:
        """The items of an array of strings. Raises ValueError if it isn't one, or isn't UTF-8."""
        if self.item_type is not _ValueType.STRING:
            raise ValueError(f"is an array of {self.item_type.name}, not of STRING")
        raw, unpack, position = bytes(self.raw), _U64.unpack_from, 0
        items = []
        for index in range(self.count):
            start = position + 8
            position = start + unpack(raw, position)[0]
            try:
                items.append(raw[start:position].decode("utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"holds an item (number {index}) that isn't UTF-8") from error
        return items

    def numbers(self) -> list[Any]:
        """The items of an array of numbers. Raises ValueError if it is an array of strings."""
        if self.item_type is _ValueType.STRING:
            raise ValueError("is an array of STRING, not of numbers")
        code = _SCALARS[self.item_type].format
        values: list[Any] = np.frombuffer(self.raw, dtype=np.dtype(code)).tolist()
        return values


MetadataValue = int | float | bool | str | GgufArray


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table. ``shape`` is row-major (the file lists the fastest dimension first)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    n_bytes: int


class _Cursor:
    """Reads little-endian values from the header and never past the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.position = 0

    def need(self, n_bytes: int, what: str) -> None:
        if n_bytes > self.size - self.position:
            raise ValueError(
                f"{what} at byte {self.position} needs {n_bytes} bytes, but the file ends at byte {self.size} "
                "(truncated or corrupt)"
            )

    def unpack(self, form: struct.Struct, what: str) -> Any:
        self.need(form.size, what)
        value = form.unpack_from(self.data, self.position)[0]
        self.position += form.size
        return value

    def string(self, what: str) -> str:
        length = self.unpack(_U64, f"the length of {what}")
        self.need(length, what)
        raw = self.data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} at byte {self.position - length} isn't UTF-8 (corrupt)") from error

    def skip_strings(self, count: int, what: str) -> None:
        data, size, position, unpack = self.data, self.size, self.position, _U64.unpack_from
        for index in range(count):
            if position + 8 > size:
                self.position = position
                self.need(8, f"item {index} of {what}")
            position += 8 + unpack(data, position)[0]
        if position > size:
            self.need(position - self.position, what)
        self.position = position


class GgufFile:
    """An opened GGUF file: ``metadata`` and ``tensors`` by name; bytes on demand.

    Raises ModelLoadError if the file can't be read, isn't GGUF, or is truncated or corrupt.

    Attributes:
        data: the file, for the tensors' bytes.
        header: the file's bytes up to the tensor data (metadata and tensor table).
    """

    def __init__(self, path: Path) -> None:
        self.data = DataFile(path)
        try:
            self._parse()
        except (ValueError, OSError) as error:
            raise ModelLoadError(f"{path}: {error}") from error

    def _parse(self) -> None:
        if self.data.size < 24:
            raise ValueError(f"not a GGUF file: {self.data.size} bytes, a header takes at least 24")
        with mmap.mmap(self.data.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            if data[:4] != _MAGIC:
                raise ValueError(f"not a GGUF file: it begins with {data[:4]!r}, not {_MAGIC!r}")
            cursor.position = 4
            version = cursor.unpack(_U32, "the version")
            if version & 0xFFFF == 0:
                raise ValueError("big-endian GGUF files aren't supported")
            if version not in _VERSIONS:
                raise ValueError(f"GGUF version {version} isn't supported (only {', '.join(map(str, _VERSIONS))})")
            n_tensors = cursor.unpack(_U64, "the tensor count")
            n_values = cursor.unpack(_U64, "the metadata count")
            # The smallest entries: an empty key with a one-byte value, a nameless tensor of one dimension.
            cursor.need(n_values * 13, f"metadata with {n_values} entries")
            cursor.need(n_tensors * 32, f"a table of {n_tensors} tensors")
            spans = self._walk_metadata(cursor, n_values)
            table = self._walk_tensors(cursor, n_tensors)
            alignment = self._alignment(spans)
            data_start = -(-cursor.position // alignment) * alignment
            self.header = data[: cursor.position]
        view = memoryview(self.header)
        self.metadata: dict[str, MetadataValue] = {
            key: GgufArray(value[0], value[1], view[value[2] : value[3]]) if isinstance(value, tuple) else value
            for key, value in spans.items()
        }
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, raw_type, offset in table:
            if name in self.tensors:
                raise ValueError(f"tensor {name!r} is listed twice (corrupt)")
            self.tensors[name] = self._tensor(name, shape, raw_type, data_start + offset, offset, alignment)

    def _walk_metadata(self, cursor: _Cursor, count: int) -> dict[str, Any]:
        """Values by key; an array is (item type, count, start, end), so that it can be decoded later."""
        values: dict[str, Any] = {}
        for index in range(count):
            key = cursor.string(f"metadata key {index}")
            if key in values:
                raise ValueError(f"metadata key {key!r} is listed twice (corrupt)")
            kind = self._value_type(cursor, key)
            if kind is _ValueType.STRING:
                values[key] = cursor.string(f"the value of {key!r}")
            elif kind is _ValueType.ARRAY:
                item = self._value_type(cursor, key)
                length = cursor.unpack(_U64, f"the length of {key!r}")
                what = f"{key!r} with {length} items"
                if item is _ValueType.ARRAY:
                    raise ValueError(f"{key!r} is an array of arrays, which isn't supported")
                if item is _ValueType.STRING:
                    cursor.need(length * 8, what)
                    start = cursor.position
                    cursor.skip_strings(length, what)
                else:
                    start, n_bytes = cursor.position, length * _SCALARS[item].size
                    cursor.need(n_bytes, what)
                    cursor.position += n_bytes
                values[key] = (item, length, start, cursor.position)
            else:
                values[key] = cursor.unpack(_SCALARS[kind], f"the value of {key!r}")
        return values

    @staticmethod
    def _value_type(cursor: _Cursor, key: str) -> _ValueType:
        raw = cursor.unpack(_U32, f"the type of {key!r}")
        try:
            return _ValueType(raw)
        except ValueError as error:
            raise ValueError(f"metadata key {key!r} has the unknown type {raw} (corrupt)") from error

    @staticmethod
    def _walk_tensors(cursor: _Cursor, count: int) -> list[tuple[str, tuple[int, ...], int, int]]:
        table = []
        for index in range(count):
            name = cursor.string(f"the name of tensor {index}")
            n_dimensions = cursor.unpack(_U32, f"the rank of tensor {name!r}")
            if not 1 <= n_dimensions <= _MAX_DIMENSIONS:
                raise ValueError(f"tensor {name!r} has {n_dimensions} dimensions, not 1 to {_MAX_DIMENSIONS} (corrupt)")
            shape = tuple(cursor.unpack(_U64, f"the shape of tensor {name!r}") for _ in range(n_dimensions))
            raw_type = cursor.unpack(_U32, f"the type of tensor {name!r}")
            table.append((name, shape[::-1], raw_type, cursor.unpack(_U64, f"the offset of tensor {name!r}")))
        return table

    @staticmethod
    def _alignment(values: dict[str, Any]) -> int:
        alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment must be a power of two, got {alignment!r} (corrupt)")
        return alignment

    def _tensor(
        self, name: str, shape: tuple[int, ...], raw_type: int, start: int, offset: int, alignment: int
    ) -> GgufTensor:
        try:
            kind = GGMLQuantizationType(raw_type)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise ValueError(f"tensor {name!r} has the unknown type {raw_type} (corrupt, or too new)") from error
        if 0 in shape:
            raise ValueError(f"tensor {name!r} has the empty shape {list(shape)} (corrupt)")
        if shape[-1] % block:
            raise ValueError(
                f"tensor {name!r} has rows of {shape[-1]} values, which {kind.name} can't hold (blocks of {block})"
            )
        if offset % alignment:
            raise ValueError(f"tensor {name!r} starts at {offset}, not a multiple of {alignment} (corrupt)")
        n_elements = 1
        for size in shape:
            n_elements *= size
        n_bytes = n_elements // block * block_bytes
        if start + n_bytes > self.data.size:
            raise ValueError(
                f"tensor {name!r} ends at byte {start + n_bytes}, but the file has {self.data.size} bytes "
                "(truncated or corrupt)"
            )
        return GgufTensor(name, shape, kind, start, n_bytes)
