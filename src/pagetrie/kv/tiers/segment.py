"""Append-only segment files: many pages in one file, self-describing, quick to open.

A segment is a header (magic, version, the secret's name), then records (``record``), and, once it is full, an index:
all heads once more and a trailer that says where they start. A segment without a trailer, because its writer was
killed, is read record by record; the first that isn't whole ends it, and is cut off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from struct import Struct

from pagetrie.kv.tiers.record import (
    HEAD_BYTES,
    MAX_TOKEN_BYTES,
    TAG_BYTES,
    Buffer,
    Head,
    Seal,
    parse_head,
    token_bytes_of,
)

_HEADER = Struct("<8sHxxxxxx16s")
_TRAILER = Struct(f"<8sQQ{TAG_BYTES}s")
_MAGIC, _TRAILER_MAGIC = b"ptseg\r\n\0", b"ptindex\n"
_VERSION = 1
_ADVICE_BYTES = 512 << 10
HEADER_BYTES, TRAILER_BYTES = _HEADER.size, _TRAILER.size


class SegmentError(Exception):
    """A file that isn't a segment of ours: another version, another secret, no segment at all."""


class Segment:
    """One file. Appended to by one thread; read by any, through positions, for as long as somebody holds the object.

    Args:
        path: the file.
        descriptor: an open file descriptor; closed with the last reference to this object, so that no reader ever
            meets a closed or reused one.
        size: bytes in the file that belong to it.

    Attributes:
        sealed: it has its index and takes no more records.
        keys: of the records, in order; kept by whoever appends.
        owners: tags of whose they are; likewise.
    """

    def __init__(self, path: Path, descriptor: int, size: int, *, sealed: bool = False) -> None:
        self.path = path
        self.descriptor = descriptor
        self.size = size
        self.sealed = sealed
        self.keys: list[bytes] = []
        self.owners: set[bytes] = set()
        self._heads: list[bytes] = []
        self._head_bytes = 0
        self._records_end = size

    def __del__(self) -> None:
        os.close(self.descriptor)

    @classmethod
    def create(cls, path: Path, secret_name: bytes) -> Segment:
        """Raises OSError."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        segment = cls(path, descriptor, 0)
        try:
            segment._write([_HEADER.pack(_MAGIC, _VERSION, secret_name)])
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return segment

    @classmethod
    def open(cls, path: Path, secret_name: bytes, *, writable: bool) -> Segment:
        """Raises SegmentError, OSError."""
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
        segment = cls(path, descriptor, os.fstat(descriptor).st_size)
        if os.pread(descriptor, HEADER_BYTES, 0) != _HEADER.pack(_MAGIC, _VERSION, secret_name):
            raise SegmentError(f"{path} is no segment of this version and secret")
        return segment

    def append(self, head: bytes, data: Buffer) -> int:
        """Add a record; returns where it starts. On OSError the file is as it was before."""
        offset = self.size
        self._write([head, data])
        self._note(head)
        return offset

    def _note(self, head: bytes) -> None:
        self._heads.append(head)
        self._head_bytes += len(head)

    def seal(self, seal: Seal) -> None:
        """Add the index if there is none. Raises OSError, and leaves a segment that can be read record by record."""
        index, sealed, self.sealed = b"".join(self._heads), self.sealed, True
        self._heads.clear()
        self._head_bytes = 0
        if not sealed:
            self._write([index, _TRAILER.pack(_TRAILER_MAGIC, len(index), self.size, seal.tag(index))])

    def index_bytes(self) -> int:
        """What ``seal`` would add."""
        return 0 if self.sealed else self._head_bytes + _TRAILER.size

    def read(self, buffers: list[bytearray | memoryview], offset: int) -> int:
        """Fill buffers from the file; returns how many bytes there were. Raises OSError."""
        return os.preadv(self.descriptor, buffers, offset)

    def will_read(self, offset: int, length: int) -> None:
        """Let the system fetch what is read soon. It takes only so much of a request, hence several."""
        for start in range(offset, offset + length, _ADVICE_BYTES):
            os.posix_fadvise(
                self.descriptor, start, min(_ADVICE_BYTES, offset + length - start), os.POSIX_FADV_WILLNEED
            )

    def records(self, seal: Seal) -> Iterator[tuple[int, Head]]:
        """All whole records as (offset, head). Afterwards ``size`` ends at the last of them, or after the index."""
        index = self._read_index(seal)
        if index is not None:
            yield from index
            return
        offset = HEADER_BYTES
        while True:
            raw = os.pread(self.descriptor, HEAD_BYTES + MAX_TOKEN_BYTES, offset)
            head = parse_head(raw, seal)
            if head is None or offset + head.size + head.page_bytes > self.size:
                break
            self._note(raw[: head.size])
            yield offset, head
            offset += head.size + head.page_bytes
        self.size = self._records_end = offset

    def reopen(self) -> None:
        """After ``records``: cut off the index, and whatever isn't whole, to append again. Raises OSError."""
        self.size = self._records_end
        self.sealed = False
        os.ftruncate(self.descriptor, self.size)

    def _read_index(self, seal: Seal) -> list[tuple[int, Head]] | None:
        raw = os.pread(self.descriptor, _TRAILER.size, max(0, self.size - _TRAILER.size))
        if len(raw) < _TRAILER.size:
            return None
        magic, length, end, tag = _TRAILER.unpack(raw)
        if magic != _TRAILER_MAGIC or end + length + _TRAILER.size != self.size or end < HEADER_BYTES:
            return None
        index = os.pread(self.descriptor, length, end)
        if len(index) != length or seal.tag(index) != tag:
            return None
        found: list[tuple[int, Head]] = []
        heads: list[bytes] = []
        position, offset = 0, HEADER_BYTES
        while position < length:
            view = index[position : position + HEAD_BYTES + MAX_TOKEN_BYTES]
            head = parse_head(view, seal) if token_bytes_of(view) is not None else None
            if head is None:
                return None
            found.append((offset, head))
            heads.append(view[: head.size])
            position += head.size
            offset += head.size + head.page_bytes
        if offset != end:
            return None
        self._heads, self._head_bytes = heads, length
        self.sealed = True
        self._records_end = end
        return found

    def _write(self, parts: list[Buffer]) -> None:
        total = sum(memoryview(part).nbytes for part in parts)
        try:
            written = os.pwritev(self.descriptor, parts, self.size)
            while written < total:  # a short write: the rest, or the error that explains it
                rest = memoryview(b"".join(parts))[written:]
                written += os.pwrite(self.descriptor, rest, self.size + written)
        except OSError:
            os.ftruncate(self.descriptor, self.size)
            raise
        self.size += total
