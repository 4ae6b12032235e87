"""Page keys that mean the same in every process that knows the secret.

A page's key is a keyed BLAKE3 chain, ``H(secret, parent key || token ids as u32 LE)``, rooted in the namespace: it
names the page's tokens *and* everything before them. Without the secret, keys can be neither predicted nor collided.
"""

from __future__ import annotations

from blake3 import blake3

KEY_BYTES = 32
SECRET_BYTES = 32


class ChainKeys:
    """The keys under one secret.

    Args:
        secret: 32 bytes. Raises ValueError for any other number.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"the secret of page keys must have {SECRET_BYTES} bytes, got {len(secret)}")
        # Keyed and told apart from each other once; copying that state is cheaper than starting anew for each page.
        self._root = blake3(b"root", key=secret)
        self._page = blake3(b"page", key=secret)

    def root(self, namespace: bytes) -> bytes:
        """The parent key of a namespace's first pages."""
        return self._root.copy().update(namespace).digest()

    def page(self, parent: bytes, tokens: bytes) -> bytes:
        """The key of a full page holding ``tokens`` (u32 little-endian) after the page with key ``parent``."""
        return self._page.copy().update(parent + tokens).digest()
