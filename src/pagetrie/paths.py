"""Where pagetrie keeps files that it can make again, and how it writes them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """The cache folder: ``$PAGETRIE_CACHE_DIR``, else ``$XDG_CACHE_HOME/pagetrie``, else ``~/.cache/pagetrie``.

    It need not exist yet.
    """
    own = os.environ.get("PAGETRIE_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "pagetrie"


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that a reader sees the old file or the whole new one, never a part.

    Makes the parent folder. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
