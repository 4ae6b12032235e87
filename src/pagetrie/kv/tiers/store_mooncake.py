"""Mooncake's distributed store as shared store."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import parse_qs, urlsplit

from mooncake.store import MooncakeDistributedStore

from pagetrie.errors import ConfigError

_PREFIX = "pagetrie-page-1-"


class MooncakeBackend:
    """One object per page over TCP (``store.Backend``).

    Args:
        url: ``mooncake://master:port?host=NAME&segment=BYTES&buffer=BYTES&metadata=URL``. ``host`` is this machine's
            name for the others (default localhost), ``segment`` the memory it gives to the store (default 512 MiB).

    Raises:
        ConfigError: the master can't be reached.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        self._store = MooncakeDistributedStore()
        status = self._store.setup(
            options.get("host", "localhost"),
            options.get("metadata", "P2PHANDSHAKE"),
            int(options.get("segment", 512 << 20)),
            int(options.get("buffer", 128 << 20)),
            "tcp",
            "",
            parts.netloc,
        )
        if status:
            raise ConfigError(f"can't join the Mooncake store at {parts.netloc} (status {status})")

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [answer == 1 for answer in self._store.batch_is_exist([_PREFIX + name for name in names])]

    def get(self, names: Sequence[str], limit: int) -> list[bytes | memoryview | None]:
        fitting = [0 < self._store.get_size(_PREFIX + name) <= limit for name in names]
        return [
            self._store.get(_PREFIX + name) or None if fits else None for name, fits in zip(names, fitting, strict=True)
        ]

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        names, values = [_PREFIX + name for name, _ in items], [value for _, value in items]
        status = self._store.put_batch(names, values)
        if status:
            raise OSError(f"put_batch gave status {status}")

    def close(self) -> None:
        self._store.close()
