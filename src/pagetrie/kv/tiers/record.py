"""The envelope of a page outside the pool: a fixed head, the token ids, then the page's bytes.

Nothing here is ever unpickled or trusted: every length is checked before anything is allocated, every field is
compared with what was asked for, and head and page bytes each carry a tag. A mismatch of anything is a miss.

Head (little-endian): magic 8s, version u16, kind of tag u16, token bytes u32, page bytes u64, key 32s, parent 32s,
namespace 32s, tag of the page bytes 16s, tag of all before and of the token ids 16s.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Protocol, TypeAlias

from blake3 import blake3
from xxhash import xxh3_128_digest

from pagetrie.kv.keys import KEY_BYTES
from pagetrie.kv.tiers.interface import PageRef
from pagetrie.kv.tokens import TOKEN_BYTES

Buffer: TypeAlias = bytes | bytearray | memoryview

VERSION = 1
TAG_BYTES = 16
MAX_TOKEN_BYTES = 256 * TOKEN_BYTES
"""The largest page has 256 tokens."""

_MAGIC = b"ptpage\r\n"
_HEAD = Struct(f"<8sHHIQ{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}s{TAG_BYTES}s{TAG_BYTES}s")
HEAD_BYTES = _HEAD.size


class Seal(Protocol):
    """How bytes are tagged.

    Attributes:
        kind: the number that says so in the head.
    """

    kind: int

    def tag(self, *parts: Buffer) -> bytes:
        """16 bytes that change if any part does."""
        ...


class Checksum:
    """XXH3-128: finds faults of a medium that is ours alone (a local disk), faster than memory is copied."""

    kind = 1

    def tag(self, *parts: Buffer) -> bytes:
        return xxh3_128_digest(parts[0] if len(parts) == 1 else b"".join(parts))


class Signature:
    """Keyed BLAKE3: also tells what others wrote without the secret, for a store that more than we can write to.

    Args:
        secret: 32 bytes, that of the page keys.
    """

    kind = 2

    def __init__(self, secret: bytes) -> None:
        self._base = blake3(b"page envelope", key=secret)

    def tag(self, *parts: Buffer) -> bytes:
        digest = self._base.copy()
        for part in parts:
            digest.update(part)
        return digest.digest(TAG_BYTES)


@dataclass(frozen=True, slots=True)
class Head:
    """A record's head, its own tag already checked."""

    ref: PageRef
    page_bytes: int
    page_tag: bytes

    @property
    def size(self) -> int:
        """Bytes of head and token ids."""
        return HEAD_BYTES + len(self.ref.tokens)


def pack_head(ref: PageRef, data: Buffer, seal: Seal) -> bytes:
    """Head and token ids, to be followed by ``data``."""
    length = memoryview(data).nbytes
    front = _HEAD.pack(
        _MAGIC, VERSION, seal.kind, len(ref.tokens), length, ref.key, ref.parent, ref.namespace, seal.tag(data), b""
    )[:-TAG_BYTES]
    return front + seal.tag(front, ref.tokens) + ref.tokens


def token_bytes_of(head: Buffer) -> int | None:
    """From a head alone, the length of the token ids that follow it; None if it is no head of ours."""
    if len(head) < HEAD_BYTES:
        return None
    magic, version, _, length = _HEAD.unpack_from(head)[:4]
    if magic != _MAGIC or version != VERSION or not 0 < length <= MAX_TOKEN_BYTES or length % TOKEN_BYTES:
        return None
    return int(length)


def parse_head(data: Buffer, seal: Seal) -> Head | None:
    """The head at the front of ``data`` (which also holds the token ids); None unless all of it is right."""
    token_bytes = token_bytes_of(data)
    if token_bytes is None or len(data) < HEAD_BYTES + token_bytes:
        return None
    _, _, kind, _, page_bytes, key, parent, namespace, page_tag, head_tag = _HEAD.unpack_from(data)
    front, tokens = bytes(data[: HEAD_BYTES - TAG_BYTES]), bytes(data[HEAD_BYTES : HEAD_BYTES + token_bytes])
    if kind != seal.kind or seal.tag(front, tokens) != head_tag:
        return None
    return Head(PageRef(key, parent, namespace, tokens), page_bytes, page_tag)


def matches(head: Head | None, ref: PageRef, data: Buffer, seal: Seal) -> bool:
    """Whether this is the very page that was asked for, with all its bytes."""
    return (
        head is not None
        and head.ref == ref
        and head.page_bytes == memoryview(data).nbytes
        and seal.tag(data) == head.page_tag
    )
