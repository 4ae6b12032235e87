"""From options to a stack of tiers that is open."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from pagetrie.errors import ConfigError
from pagetrie.kv.keys import SECRET_BYTES, ChainKeys
from pagetrie.kv.tiers.codec import PageCodec
from pagetrie.kv.tiers.disk import DiskTier, segment_paths
from pagetrie.kv.tiers.folder import CacheFolder
from pagetrie.kv.tiers.interface import PageBytes, Tier
from pagetrie.kv.tiers.ram import RamTier
from pagetrie.kv.tiers.sealed import SEALED_BYTES, Keyring, SealedTier
from pagetrie.kv.tiers.stack import TierStack
from pagetrie.kv.tiers.store import StoreTier, open_backend
from pagetrie.kv.transfers import Transfers

_CONTEXT = "pagetrie 2026 secret of a shared store of pages"


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Which tiers to have.

    Attributes:
        ram_bytes: capacity of the memory tier; 0 for none.
        ram_codec: how it keeps pages; None for as they are.
        disk: folder of the disk tier; None for none.
        disk_bytes: its capacity.
        store: URL of the shared store; None for none. Needs the secret.
        secret: keys the pages' names (32 bytes); None for the disk folder's own, or a random one.
        sealed: encrypt what leaves the process; see ``sealed``.
    """

    ram_bytes: int = 0
    ram_codec: PageCodec | None = None
    disk: Path | None = None
    disk_bytes: int = 0
    store: str | None = None
    secret: bytes | None = None
    sealed: bool = False


def derive_secret(text: str) -> bytes:
    """The 32 bytes that key the pages of servers which are given the same text."""
    return blake3(text.encode(), derive_key_context=_CONTEXT).digest()


def sweep(path: Path, owners: Sequence[bytes], secret: bytes | None = None) -> int:
    """Delete all pages of owners from a disk cache that no server uses. Returns the pages that went.

    Raises:
        FolderInUseError: a server does; it drops them itself when it is told.
        ConfigError: the folder can't be used.
    """
    folder = CacheFolder(path, secret, sealed=CacheFolder.is_sealed(path))
    # Room for all that is there and for a segment to be written anew: nothing else must go.
    size = sum(segment.stat().st_size for segment in segment_paths(path))
    tier = DiskTier(folder, 2 * size + (64 << 20))
    before = tier.stats.pages
    keys = ChainKeys(folder.secret)
    for owner in owners:
        tier.drop_owner(keys.tag(owner))
    after = tier.stats.pages
    tier.close()
    return before - after


def open_tiers(
    options: TierOptions, memory: PageBytes, clock: Callable[[], float] = time.monotonic, attention: float = 0.0
) -> tuple[Transfers | None, bytes]:
    """The tiers below a pool (None if no option asks for one), and the secret of the page keys.

    Args:
        attention: see ``PrefillSpeed``.

    Raises:
        FolderInUseError: another process holds the disk folder.
        ConfigError: a tier can't be had as asked for.
    """
    tiers: list[Tier] = []
    secret = options.secret
    keyring = Keyring() if options.sealed else None

    def seal(tier: Tier) -> Tier:
        return SealedTier(tier, keyring) if keyring is not None else tier

    if options.ram_bytes:
        tiers.append(RamTier(options.ram_bytes, memory.bytes_per_page, clock, options.ram_codec))
    if options.disk is not None:
        if options.disk_bytes < 2 * memory.bytes_per_page:
            raise ConfigError(
                f"a disk cache of {options.disk_bytes} bytes is too small: a page takes {memory.bytes_per_page} bytes"
            )
        folder = CacheFolder(options.disk, secret, sealed=options.sealed)
        secret = folder.secret
        tiers.append(seal(DiskTier(folder, options.disk_bytes, clock)))
    if options.store is not None:
        if options.secret is None:
            raise ConfigError("a shared store needs a secret that all servers on it have in common")
        page_bytes = memory.bytes_per_page + (SEALED_BYTES if options.sealed else 0)
        tiers.append(seal(_open_store(options.store, options.secret, page_bytes, clock)))
    if secret is None:
        secret = secrets.token_bytes(SECRET_BYTES)
    if not tiers:
        return None, secret
    return Transfers(TierStack(tiers, memory, clock=clock), ChainKeys(secret), keyring, attention), secret


def _open_store(url: str, secret: bytes, bytes_per_page: int, clock: Callable[[], float]) -> StoreTier:
    try:
        backend = open_backend(url)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"can't open the store {_without_password(url)}: {error}") from error
    return StoreTier(backend, secret=secret, bytes_per_page=bytes_per_page, title=_without_password(url), clock=clock)


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)
