"""Pages that leave the process sealed: AES-256-GCM under a key that only who knows the namespace can derive.

A tenant's namespace holds bytes derived from its secret, so the key does too. It is kept nowhere: without the tenant's
secret its pages can be neither found nor read. Token ids are not stored; they, the keys and the namespace's name are
bound to the page as associated data.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from pagetrie.kv.keys import tag_of
from pagetrie.kv.shares import Allowance
from pagetrie.kv.tiers.interface import Bytes, PageRef, Tier, TierStats
from pagetrie.kv.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE_BYTES, TAG_BYTES = 12, 16
SEALED_BYTES = NONCE_BYTES + TAG_BYTES
"""How much longer a sealed page is."""

_CONTEXT = "pagetrie 2026-11 page sealing"
_NO_TOKENS = bytes(TOKEN_BYTES)
_REMEMBERED = 65_536


class Keyring:
    """The keys of the namespaces in use, by their names (``ChainKeys.root``). Threads may look up at any time."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # only who seals waits for it

        self._cipher = AESGCM
        self._keys: OrderedDict[bytes, AESGCM] = OrderedDict()

    def note(self, name: bytes, namespace: bytes) -> None:
        """Derive the key of a namespace."""
        self._keys[name] = self._cipher(blake3(namespace, derive_key_context=_CONTEXT).digest())
        self._keys.move_to_end(name)
        if len(self._keys) > _REMEMBERED:
            self._keys.popitem(last=False)

    def forget(self, tag: bytes) -> None:
        """Drop the keys of an owner's namespaces."""
        for name in [name for name in self._keys.copy() if tag_of(name) == tag]:
            del self._keys[name]

    def get(self, name: bytes) -> AESGCM | None:
        return self._keys.get(name)


class SealedTier:
    """A tier that holds sealed pages (``Tier``), around one that stores them.

    Args:
        tier: stores pages of ``SEALED_BYTES`` more.
        keyring: knows the namespaces of the pages asked for.
    """

    def __init__(self, tier: Tier, keyring: Keyring) -> None:
        self._tier = tier
        self._keyring = keyring
        self.name = tier.name
        self.traits = tier.traits

    @property
    def stats(self) -> TierStats:
        return self._tier.stats

    def holds(self, key: bytes) -> bool:
        return self._tier.holds(key)

    def contains(self, keys: Sequence[bytes]) -> int:
        return self._tier.contains(keys)

    def get(self, refs: Sequence[PageRef]) -> Iterator[Bytes]:
        for ref, sealed in zip(refs, self._tier.get([_outside(ref) for ref in refs]), strict=False):
            page = self._open(ref, sealed)
            if page is None:
                self._tier.stats.failed_pages += 1
                return
            yield page

    def _open(self, ref: PageRef, sealed: Bytes) -> Bytes | None:
        from cryptography.exceptions import InvalidTag

        key = self._keyring.get(ref.namespace)
        if key is None or sealed.nbytes < SEALED_BYTES:
            return None
        page = np.empty(sealed.nbytes - SEALED_BYTES, np.uint8)
        data = sealed.data
        try:
            key.decrypt_into(data[:NONCE_BYTES], data[NONCE_BYTES:], _bound(ref), page.data)
        except InvalidTag:
            return None
        return page

    def put(self, pages: Sequence[tuple[PageRef, Bytes]]) -> int:
        sealed = []
        for ref, page in pages:
            key = self._keyring.get(ref.namespace)
            if key is not None:
                sealed.append((_outside(ref), _seal(key, ref, page)))
        return self._tier.put(sealed)

    def touch(self, key: bytes) -> None:
        self._tier.touch(key)

    def name_namespace(self, key: bytes, namespace: bytes) -> None:
        """Nothing: pages are sealed under what this would give away."""

    def allow(self, allowances: Mapping[bytes, Allowance]) -> None:
        self._tier.allow(allowances)

    def drop_owner(self, tag: bytes) -> None:
        self._tier.drop_owner(tag)

    def clear(self) -> None:
        self._tier.clear()

    def close(self) -> None:
        self._tier.close()


def _seal(key: AESGCM, ref: PageRef, page: Bytes) -> Bytes:
    out = np.empty(page.nbytes + SEALED_BYTES, np.uint8)
    nonce = secrets.token_bytes(NONCE_BYTES)
    out[:NONCE_BYTES] = np.frombuffer(nonce, np.uint8)
    key.encrypt_into(nonce, page.data, _bound(ref), out[NONCE_BYTES:].data)
    return out


def _outside(ref: PageRef) -> PageRef:
    """What is seen of a page's name from outside."""
    return PageRef(ref.key, ref.parent, ref.namespace, _NO_TOKENS)


def _bound(ref: PageRef) -> bytes:
    return ref.key + ref.parent + ref.namespace + ref.tokens
