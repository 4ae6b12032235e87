"""Mooncake's distributed store as shared store."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from urllib.parse import parse_qs, urlsplit

from mooncake.store import MooncakeDistributedStore

from pagetrie.errors import ConfigError
from pagetrie.kv.tiers.store import StoreFullError

_PREFIX = "pagetrie-page-1-"
_NO_ROOM = -200
_CLOSE_SECONDS = 2.0


class MooncakeBackend:
    """One object per page over TCP (``store.Backend``).

    Args:
        url: ``mooncake://master:port?host=NAME&segment=BYTES&buffer=BYTES&metadata=URL``. ``host`` is this machine's
            name for the others (default localhost), ``segment`` the memory it gives to the store (default 512 MiB),
            ``buffer`` what it reads and writes through (default 128 MiB).

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
        answers = self._store.batch_is_exist([_PREFIX + name for name in names])
        if answers and min(answers) < 0:
            raise OSError(f"the master doesn't answer (status {min(answers)})")
        return [answer == 1 for answer in answers]

    def get(self, names: Sequence[str], limit: int) -> list[bytes | memoryview | None]:
        # The client reads into a buffer of bounded size; what is longer than a page is not copied out of it.
        handles = self._store.batch_get_buffer([_PREFIX + name for name in names])
        if all(handle is None for handle in handles):
            self.exists(names[:1])  # nothing there, or nobody
        return [None if handle is None or handle.size() > limit else memoryview(handle) for handle in handles]

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        names, values = [_PREFIX + name for name, _ in items], [value for _, value in items]
        status = self._store.put_batch(names, values)
        if status == _NO_ROOM:
            raise StoreFullError("no segment has room")
        if status:
            raise OSError(f"put_batch gave status {status}")

    def close(self) -> None:
        # It takes leave of a master that may be gone, which nobody shall wait for.
        leaving = threading.Thread(target=self._store.close, name="pagetrie-mooncake-close", daemon=True)
        leaving.start()
        leaving.join(_CLOSE_SECONDS)
