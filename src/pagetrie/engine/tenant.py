"""Whose request it is, as far as engine and cache are concerned."""

from __future__ import annotations

from dataclasses import dataclass

from pagetrie.kv import Allowance, owner_id


@dataclass(frozen=True, slots=True)
class Tenant:
    """Someone who shares nothing with others but what is public.

    Attributes:
        name: told apart by this; also what queues and reports are kept under.
        salt: bytes that only the server and this tenant's pages know of; part of every page's namespace. Empty for the
            one tenant of a server without API keys.
        weight: its share of the work when tenants compete, against other tenants' weights; more than 0.
        max_model_len: longest prompt plus output, in tokens, if that is less than the engine's own limit.
        cache_floor, cache_cap: parts of the pool, and of each tier below it, that others can't take from it, and that
            it may leave cached at most.
        pinned: its part of the pages that may be pinned.
    """

    name: str = ""
    salt: bytes = b""
    weight: float = 1.0
    max_model_len: int | None = None
    cache_floor: float = 0.0
    cache_cap: float = 1.0
    pinned: float = 1.0

    @property
    def owner(self) -> bytes:
        """Who owns its pages, as far as the cache is concerned."""
        return owner_id("tenant", self.salt) if self.salt else b""

    @property
    def allowance(self) -> Allowance:
        return Allowance(self.cache_floor, self.cache_cap, self.weight, self.pinned)


LOCAL = Tenant()
"""The one tenant of a server without API keys, and of the Python API."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who may use a context: a tenant, or the part of it that goes by a client's own salt.

    Attributes:
        server: the server itself, which pins prefixes for them; no request comes from it.
    """

    tenant: Tenant = LOCAL
    salt: str = ""
    server: bool = False

    @property
    def key(self) -> tuple[str, bytes, str, bool]:
        """What is compared. A tenant's limits may change meanwhile, but a new one of the same name is another."""
        return self.tenant.name, self.tenant.salt, self.salt, self.server
