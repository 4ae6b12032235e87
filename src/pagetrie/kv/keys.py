"""Page keys that mean the same in every process that knows the secret.

A page's key is a keyed BLAKE3 chain, ``H(secret, parent key || token ids as u32 LE)``, rooted in the namespace: it
names the page's tokens *and* everything before them. Without the secret, keys can be neither predicted nor collided.
"""

from __future__ import annotations

from blake3 import blake3

from pagetrie.kv.namespace import owner_of

KEY_BYTES = 32
TAG_BYTES = 8
SECRET_BYTES = 32


def tag_of(root: bytes) -> bytes:
    """The tag of the owner of a namespace, by its name (``ChainKeys.root``)."""
    return root[:TAG_BYTES]


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
        self._owner = blake3(b"owner", key=secret)

    def root(self, namespace: bytes, epoch: bytes = b"") -> bytes:
        """The parent key of a namespace's first pages. It begins with the owner's tag.

        Args:
            namespace: as encoded.
            epoch: tells keys of equal namespaces apart.
        """
        rest = self._root.copy().update(namespace + epoch).digest(KEY_BYTES - TAG_BYTES)
        return self.tag(owner_of(namespace)) + rest

    def tag(self, owner: bytes) -> bytes:
        """What the names of all of an owner's namespaces begin with."""
        return self._owner.copy().update(owner).digest(TAG_BYTES)

    def page(self, parent: bytes, tokens: bytes) -> bytes:
        """The key of a full page holding ``tokens`` (u32 little-endian) after the page with key ``parent``."""
        return self._page.copy().update(parent + tokens).digest()
