"""Reading parts of a large file without mapping it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from pagetrie.errors import ModelLoadError


class DataFile:
    """A file kept open for the life of the object, read piece by piece; safe to use from several threads.

    Read, not mapped: a file that shrinks under a map kills the process instead of raising.
    Raises ModelLoadError if it can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise ModelLoadError(f"{path}: can't be read: {error.strerror}") from error

    def fileno(self) -> int:
        return self._file.fileno()

    def read(self, offset: int, n_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Exactly ``n_bytes`` from ``offset`` on, as a fresh uint8 array. Raises ModelLoadError."""
        buffer = np.empty(n_bytes, dtype=np.uint8)
        view, done = buffer.data, 0
        try:
            while done < n_bytes:
                count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
                if count == 0:
                    raise ModelLoadError(f"{self.path}: ends before byte {offset + n_bytes} (it became shorter)")
                done += count
        except OSError as error:
            raise ModelLoadError(f"{self.path}: can't be read: {error.strerror}") from error
        return buffer
