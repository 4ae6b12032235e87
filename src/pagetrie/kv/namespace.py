"""Namespaces: what else, besides the tokens, must be equal for pages to be shared.

A namespace is a set of named parts (model fingerprint, KV codec, page size, adapter, salt, ...). Each part is
encoded with its kind, its type and its length, so no two unequal namespaces have equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import pack

Part = str | int | bytes | None

_VERSION = b"pagetrie-namespace-1"


def encode_namespace(parts: Mapping[str, Part]) -> bytes:
    """Encode named parts injectively: equal bytes if and only if the same kinds carry the same typed values.

    A part that is None is encoded as absent-but-named, which differs from the empty string and from zero.

    Raises:
        TypeError: a value is of another type (bool included: say 0 or 1).
    """
    return _VERSION + b"".join(_frame(kind, parts[kind]) for kind in sorted(parts))


def extend_namespace(namespace: bytes, kind: str, value: Part) -> bytes:
    """A namespace with one more part, which must sort after all that it has."""
    return namespace + _frame(kind, value)


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
