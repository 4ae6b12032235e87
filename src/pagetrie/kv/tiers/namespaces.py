"""What the keys of namespaces on disk stand for: kept so that pages can be named anew under another secret.

One file of length-framed namespaces, appended to. Each proves itself: its key is recomputed when it is read.
"""

from __future__ import annotations

import os
from pathlib import Path
from struct import Struct

from pagetrie.kv.keys import ChainKeys

NAME = "namespaces"
MAX_BYTES = 1 << 20
"""Of the file. Namespaces beyond that are served all the same, but can't be exported."""

_LENGTH = Struct("<I")


def read_namespaces(folder: Path, keys: ChainKeys) -> dict[bytes, bytes]:
    """Namespaces by key. What isn't whole at the end of the file is left out."""
    try:
        data = (folder / NAME).read_bytes()[:MAX_BYTES]
    except OSError:
        return {}
    found: dict[bytes, bytes] = {}
    position = 0
    while position + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        namespace = data[position : position + length]
        if len(namespace) < length:
            break
        found[keys.root(namespace)] = namespace
        position += length
    return found


def write_namespaces(folder: Path, namespaces: list[bytes]) -> None:
    """Replace the file. Raises OSError."""
    temporary = folder / f"{NAME}.part"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.writelines(_LENGTH.pack(len(namespace)) + namespace for namespace in namespaces)
    temporary.replace(folder / NAME)
