"""Looking into a disk cache, and carrying prefixes to another one in a file.

Keys of pages depend on the secret of their folder, so an archive carries what they are made of (namespaces and token
ids) and the pages are named anew where it is unpacked. Everything in an archive is checked as it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import BinaryIO

import numpy as np

from pagetrie.errors import ConfigError
from pagetrie.kv.keys import ChainKeys
from pagetrie.kv.tiers.disk import DiskTier, segment_paths
from pagetrie.kv.tiers.folder import CacheFolder
from pagetrie.kv.tiers.interface import PageRef
from pagetrie.kv.tiers.namespaces import MAX_BYTES, read_namespaces
from pagetrie.kv.tiers.record import HEAD_BYTES, Checksum, Head, matches, pack_head, parse_head, token_bytes_of
from pagetrie.kv.tiers.segment import Segment, SegmentError
from pagetrie.kv.tokens import TOKEN_BYTES

_HEADER = Struct("<8sHxxI")
_MAGIC, _VERSION = b"ptpages\n", 1
_LENGTH = Struct("<I")
_SEAL = Checksum()

MAX_PAGE_BYTES = 1 << 30
"""No page of any model comes near; a longer one in an archive is an error, found before it is read."""


@dataclass(slots=True)
class Prefix:
    """A stored prefix that no longer one continues.

    Attributes:
        key: of its last page.
        tokens: in its pages.
        bytes: of its pages' keys and values.
        complete: every page from the start is there; otherwise it can't be used.
    """

    key: bytes
    namespace: bytes
    tokens: int
    bytes: int
    complete: bool


@dataclass(slots=True)
class Contents:
    """What a folder holds.

    Attributes:
        pages: by key; of pages stored twice, the newer.
        file_bytes: of all segments.
        useless: files that are no segments under the folder's secret.
    """

    pages: dict[bytes, tuple[Segment, int, Head]] = field(default_factory=dict)
    segments: int = 0
    file_bytes: int = 0
    useless: list[Path] = field(default_factory=list)

    def prefixes(self) -> list[Prefix]:
        """The longest stored prefixes, longest first."""
        inner = {head.ref.parent for _, _, head in self.pages.values()}
        found = []
        for key, (_, _, last) in self.pages.items():
            if key in inner:
                continue
            tokens = size = 0
            head: Head | None = last
            while head is not None:
                tokens += len(head.ref.tokens) // TOKEN_BYTES
                size += head.page_bytes
                parent = head.ref.parent
                head = self.pages[parent][2] if parent in self.pages else None
            found.append(Prefix(key, last.ref.namespace, tokens, size, parent == last.ref.namespace))
        return sorted(found, key=lambda prefix: -prefix.tokens)

    def broken(self) -> Iterator[bytes]:
        """Keys of pages whose bytes don't verify. Reads everything."""
        for key, (segment, offset, head) in self.pages.items():
            if _read(segment, offset, head) is None:
                yield key


def look_into(folder: CacheFolder) -> Contents:
    """Read the heads of all pages. Works beside a server that writes to the folder."""
    contents = Contents()
    for path in segment_paths(folder.path):
        try:
            segment = Segment.open(path, folder.secret_name, writable=False)
            for offset, head in segment.records(_SEAL):
                contents.pages[head.ref.key] = (segment, offset, head)
        except (SegmentError, OSError):
            contents.useless.append(path)
            continue
        contents.segments += 1
        contents.file_bytes += segment.size
    return contents


def export(folder: CacheFolder, out: BinaryIO, only: bytes | None = None) -> int:
    """Write prefixes to an archive; returns how many pages.

    Args:
        folder: where they are.
        out: a binary file.
        only: the start of the key of a page: that page and all before it. None for everything.

    Raises:
        ConfigError: no page, or more than one, has such a key.
    """
    contents = look_into(folder)
    names = read_namespaces(folder.path, ChainKeys(folder.secret))
    ordered = _in_order(contents, only)
    wanted = [key for key in ordered if contents.pages[key][2].ref.namespace in names]
    namespaces = sorted({names[contents.pages[key][2].ref.namespace] for key in wanted})
    by_name = {name: key for key, name in names.items()}
    out.write(_HEADER.pack(_MAGIC, _VERSION, len(namespaces)))
    for namespace in namespaces:
        out.write(by_name[namespace] + _LENGTH.pack(len(namespace)) + namespace)
    count = 0
    for key in wanted:
        segment, offset, head = contents.pages[key]
        data = _read(segment, offset, head)
        if data is not None:
            out.write(pack_head(head.ref, data, _SEAL))
            out.write(data)
            count += 1
    return count


def _in_order(contents: Contents, only: bytes | None) -> list[bytes]:
    """Keys of the usable pages, parents first."""
    pages = contents.pages
    if only is not None:
        found = [key for key in pages if key.startswith(only)]
        if len(found) != 1:
            raise ConfigError(f"{len(found)} stored pages have a key that begins with {only.hex()}")
        path = found
        while pages[path[-1]][2].ref.parent in pages:
            path.append(pages[path[-1]][2].ref.parent)
        return path[::-1]
    children: dict[bytes, list[bytes]] = {}
    for key, (_, _, head) in pages.items():
        children.setdefault(head.ref.parent, []).append(key)
    ordered: list[bytes] = []
    waiting = [
        key for parent in {head.ref.namespace for _, _, head in pages.values()} for key in children.get(parent, ())
    ]
    while waiting:
        key = waiting.pop()
        ordered.append(key)
        waiting += children.get(key, ())
    return ordered


def _read(segment: Segment, offset: int, head: Head) -> memoryview | None:
    front, data = bytearray(head.size), memoryview(bytearray(head.page_bytes))
    try:
        got = segment.read([front, data], offset)
    except OSError:
        return None
    whole = got == head.size + head.page_bytes and matches(parse_head(front, _SEAL), head.ref, data, _SEAL)
    return data if whole else None


def unpack(tier: DiskTier, archive: BinaryIO) -> tuple[int, int]:
    """Store an archive's pages; returns (pages stored or there already, pages skipped).

    Skipped are pages whose predecessor is missing, and what doesn't fit the capacity.

    Raises:
        ConfigError: this is no archive, or it is damaged; what came before the damage is stored.
    """
    keys = ChainKeys(tier.folder.secret)
    header = archive.read(_HEADER.size)
    if len(header) < _HEADER.size or _HEADER.unpack(header)[:2] != (_MAGIC, _VERSION):
        raise ConfigError("this is no archive of pages, or one of another version")
    # Names there -> names here.
    known: dict[bytes, bytes] = {}
    total = 0
    for _ in range(_HEADER.unpack(header)[2]):
        there, length = _exactly(archive, 32), _LENGTH.unpack(_exactly(archive, _LENGTH.size))[0]
        total += length
        if total > MAX_BYTES:
            raise ConfigError("the archive is damaged: its namespaces are too long")
        namespace = _exactly(archive, length)
        known[there] = keys.root(namespace)
        tier.name_namespace(known[there], namespace)
    stored = skipped = 0
    while front := archive.read(HEAD_BYTES):
        count = token_bytes_of(front)
        head = parse_head(front + _exactly(archive, count), _SEAL) if count is not None else None
        if head is None or head.page_bytes > MAX_PAGE_BYTES:
            raise ConfigError(f"the archive is damaged after {stored + skipped} pages")
        data = _exactly(archive, head.page_bytes)
        if not matches(head, head.ref, data, _SEAL):
            raise ConfigError(f"the archive is damaged after {stored + skipped} pages")
        parent, root = known.get(head.ref.parent), known.get(head.ref.namespace)
        if parent is None or root is None:
            skipped += 1
            continue
        ref = PageRef(keys.page(parent, head.ref.tokens), parent, root, head.ref.tokens)
        known[head.ref.key] = ref.key
        if tier.put([(ref, np.frombuffer(data, np.uint8))]):
            stored += 1
        else:
            skipped += 1
    return stored, skipped


def _exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise ConfigError("the archive ends too early")
    return data
