"""The disk cache's folder: one server at a time, and the secret that keys the names of its pages."""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from pathlib import Path

from blake3 import blake3

from pagetrie.errors import ConfigError
from pagetrie.kv.keys import SECRET_BYTES
from pagetrie.kv.tiers.namespaces import NAME

_SECRET, _LOCK, _SEALED = "secret", "lock", "sealed"


class FolderInUseError(ConfigError):
    """Another server writes to this folder."""


class CacheFolder:
    """A folder held by this process until ``close``. Made with mode 0700 if it isn't there.

    Attributes:
        path: the folder.
        writable: False on a read-only medium; it is then read without a lock.
        secret: 32 bytes, the same for as long as the folder lasts; its file has mode 0600.
        secret_name: 16 bytes that tell secrets apart and give nothing away.

    Args:
        path: the folder.
        secret: use this one in place of the folder's own.
        look_only: change nothing, and take no lock.
        sealed: what is stored is encrypted; it gets a secret's name of its own, so that nothing else is taken for it.
            None for tools, which can't read what is.

    Raises:
        FolderInUseError: another process holds it.
        ConfigError: it can't be made or read.
    """

    def __init__(
        self, path: Path, secret: bytes | None = None, *, look_only: bool = False, sealed: bool | None = None
    ) -> None:
        self.path = path
        self._lock: int | None = None
        try:
            if look_only:
                path.stat()
            else:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.writable = not look_only and self._take_lock()
            if sealed is None and (path / _SEALED).exists():
                raise ConfigError(f"the disk cache {path} is encrypted: only its server can read it")
            if self.writable:
                for leftover in path.glob("*.part"):
                    leftover.unlink(missing_ok=True)
                if sealed:
                    (path / _SEALED).touch(mode=0o600)
                    (path / NAME).unlink(missing_ok=True)
                else:
                    (path / _SEALED).unlink(missing_ok=True)
            self.secret = secret if secret is not None else self._own_secret()
        except OSError as error:
            self.close()
            raise ConfigError(f"can't use {path} as disk cache: {error.strerror}") from error
        except ConfigError:
            self.close()
            raise
        # The number is that of the names' form: segments of another one are dropped.
        name = b"secret's name 2, sealed" if sealed else b"secret's name 2"
        self.secret_name = blake3(name, key=self.secret).digest(16)

    @staticmethod
    def is_sealed(path: Path) -> bool:
        """Whether what is stored there is encrypted."""
        return (path / _SEALED).exists()

    def _take_lock(self) -> bool:
        try:
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            if self.path.is_dir():
                return False  # a read-only medium, or a folder of somebody else's
            raise
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUseError(f"the disk cache {self.path} is in use by another process") from None
        return True

    def _own_secret(self) -> bytes:
        path = self.path / _SECRET
        try:
            secret = path.read_bytes()
        except FileNotFoundError:
            secret = b""
        if len(secret) == SECRET_BYTES:
            return secret
        # None, or a damaged one. Pages stored under it can't be named any more and are dropped.
        secret = secrets.token_bytes(SECRET_BYTES)
        if self.writable:
            handle, temporary = tempfile.mkstemp(dir=self.path, suffix=".part")  # mode 0600
            with os.fdopen(handle, "wb") as file:
                file.write(secret)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        return secret

    def close(self) -> None:
        """Let others have it. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
