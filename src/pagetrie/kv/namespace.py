"""Namespaces: what else, besides the tokens, must be equal for pages to be shared.

A namespace is a set of named parts (model fingerprint, KV codec, page size, adapter, salt, ...). Each part is
encoded with its kind, its type and its length, so no two unequal namespaces have equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import calcsize, pack, unpack_from

from blake3 import blake3

Part = str | int | bytes | None

_VERSION = b"pagetrie-namespace-1"


def encode_namespace(parts: Mapping[str, Part]) -> bytes:
    """Encode named parts injectively: equal bytes if and only if the same kinds carry the same typed values.

    A part that is None is encoded as absent-but-named, which differs from the empty string and from zero.

    Raises:
        TypeError: a value is of another type (bool included: say 0 or 1).
    """
    return _VERSION + b"".join(_frame(kind, parts[kind]) for kind in sorted(parts))


def decode_namespace(namespace: bytes) -> dict[str, Part]:
    """The named parts of a namespace that ``encode_namespace`` made, perhaps extended.

    Raises:
        ValueError: nothing that it makes.
    """
    parts: dict[str, Part] = {}
    at = len(_VERSION)
    if not namespace.startswith(_VERSION):
        raise ValueError("not a namespace of this version")
    while at < len(namespace):
        name, at = _take(namespace, at, "<I")
        tag = namespace[at : at + 1]
        body, at = _take(namespace, at + 1, "<Q")
        if tag not in _READERS:
            raise ValueError(f"unknown type {tag!r} in a namespace")
        parts[name.decode()] = _READERS[tag](body)
    return parts


_READERS: dict[bytes, Callable[[bytes], Part]] = {
    b"n": lambda _: None,
    b"s": lambda body: body.decode("utf-8", "surrogatepass"),
    b"b": bytes,
    b"i": int,
}


def _take(data: bytes, at: int, length: str) -> tuple[bytes, int]:
    """Bytes that follow their length, and where they end."""
    begin = at + calcsize(length)
    if begin > len(data):
        raise ValueError("a namespace ends too early")
    end = begin + int(unpack_from(length, data, at)[0])
    if end > len(data):
        raise ValueError("a namespace ends too early")
    return data[begin:end], end


def extend_namespace(namespace: bytes, kind: str, value: Part) -> bytes:
    """A namespace with one more part, which must sort after all that it has."""
    return namespace + _frame(kind, value)


def owner_of(namespace: bytes) -> bytes:
    """Whose pages are in a namespace: see ``owner_id``; empty if no part says so."""
    try:
        parts = decode_namespace(namespace)
    except ValueError:
        return b""
    for kind in ("tenant", "public"):
        if parts.get(kind) is not None:
            return owner_id(kind, parts[kind])
    return b""


def owner_id(kind: str, value: Part) -> bytes:
    """16 bytes that stand for an owner of pages (the ``tenant`` or ``public`` part), and tell nothing about it."""
    return blake3(_frame(kind, value), derive_key_context="pagetrie 2026-11 owner of pages").digest(16)


def _frame(kind: str, value: Part) -> bytes:
    name = kind.encode()
    if value is None:
        tag, body = b"n", b""
    elif isinstance(value, str):
        tag, body = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        tag, body = b"b", value
    elif isinstance(value, int) and not isinstance(value, bool):
        tag, body = b"i", str(value).encode()
    else:
        raise TypeError(f"namespace part {kind!r} has unsupported type {type(value).__name__}")
    return pack("<I", len(name)) + name + tag + pack("<Q", len(body)) + body
