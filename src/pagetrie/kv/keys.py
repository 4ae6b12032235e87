"""Page keys that mean the same in every process that knows the secret.

A page's key is a keyed BLAKE3 chain, ``H(secret, parent key || token ids as u32 LE)``, rooted in the namespace: it
names the page's tokens *and* everything before them. Without the secret, keys can be neither predicted nor collided.
"""

from __future__ import annotations

from blake3 import blake3

KEY_BYTES = 32


def root_key(secret: bytes, namespace: bytes) -> bytes:
    """The parent key of a namespace's first pages. ``secret`` is 32 bytes."""
    return blake3(b"root" + namespace, key=secret).digest()


def page_key(secret: bytes, parent: bytes, tokens: bytes) -> bytes:
    """The key of a full page holding ``tokens`` (u32 little-endian) after the page with key ``parent``."""
    return blake3(b"page" + parent + tokens, key=secret).digest()
