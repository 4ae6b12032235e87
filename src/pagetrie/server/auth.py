"""Who is calling: API keys, and the tenants that they stand for."""

from __future__ import annotations

import base64
import hmac
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from pagetrie.engine.tenant import LOCAL, Owner, Tenant
from pagetrie.errors import ConfigError
from pagetrie.server import keys_file
from pagetrie.server.errors import ApiError

log = logging.getLogger("pagetrie.server")

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Need no key: load balancers ask here."""

PAGE = "/dashboard"
"""Nor does this page and what is under it: it is the same for all, and asks for a key before it shows anything."""

TENANT_PATHS = ("/v1/", "/tokenize", "/detokenize", "/version", "/openapi.json")
ADMIN_PATHS = ("/v1/admin/",)
"""Any key may use the first but for the second. All else, metrics too, speaks of all tenants and is for admin keys."""

_CALLER = "pagetrie.caller"
_CHALLENGE = {"www-authenticate": 'Bearer realm="pagetrie"'}
_BROWSER_CHALLENGE = {"www-authenticate": 'Basic realm="pagetrie", charset="UTF-8"'}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tenant may use of the server; None for no limit of its own.

    Attributes:
        max_requests: prompts in flight.
        tokens_per_minute: prompt and output tokens.
        max_body_bytes: size of a request body.
    """

    max_requests: int | None = None
    tokens_per_minute: int | None = None
    max_body_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose key came with a request.

    Attributes:
        admin: may see and change what concerns all tenants.
        key_id: names the key in logs; empty without keys.
    """

    tenant: Tenant = LOCAL
    limits: Limits = field(default_factory=Limits)
    admin: bool = True
    key_id: str = ""

    def owner(self, salt: str | None) -> Owner:
        """The caller as an owner of contexts, narrowed by the salt it gave."""
        return Owner(self.tenant, salt or "")


class Access:
    """Everybody is the one local tenant and may do everything: a server without keys, for its own machine only."""

    def identify(self, headers: Headers) -> Caller | None:
        """Whose key is in the headers; None if that is nobody's."""
        return Caller()

    def tenants(self) -> list[Tenant]:
        """All there are, by name."""
        return [LOCAL]

    def refresh(self) -> None:
        """Look whether there are others now."""

    async def tell(self, listener: Callable[[list[Tenant]], Awaitable[None]]) -> None:
        """Tell ``listener`` who there is, unless it has been told."""


class KeyedAccess(Access):
    """Callers by the keys in a file, which is read anew when it has changed. A file that is wrong changes nothing.

    Args:
        path: the file.
        max_queue: prompts that may wait in the engine; a tenant without a limit of its own gets an equal share.
        sealed: the cache is encrypted. Namespaces are others then, since those of a cache in the clear stand beside it.
        floors: part of the cache that the tenants without a floor of their own are guaranteed together.
        cap: part of it that a tenant without a cap of its own may leave cached.

    Attributes:
        public_salt: part of the namespace of pages that all tenants share.

    Raises:
        ConfigError: the file can't be used.
    """

    def __init__(
        self, path: Path, max_queue: int, *, sealed: bool = False, floors: float = 0.0, cap: float = 1.0
    ) -> None:
        self._path = path
        self._floors, self._cap = floors, cap
        self._told = False
        self._sealed = sealed
        self._max_queue = max_queue
        self._stamp = self._look()
        self._take(keys_file.load(path))
        if not keys_file.is_private(path):
            log.warning("%s holds secrets and can be read by others; chmod 600 would end that", path)

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _take(self, file: keys_file.KeysFile) -> None:
        share = max(1, self._max_queue // max(1, len(file.tenants)))
        tenants, limits = {}, {}
        floor, pinned = self._default_parts(file)
        for name, record in sorted(file.tenants.items()):
            cap = self._cap if record.cache_cap is None else record.cache_cap
            tenants[name] = Tenant(
                name,
                tenant_salt(record.secret, sealed=self._sealed),
                weight=record.weight,
                max_model_len=record.max_model_len,
                cache_floor=min(floor, cap) if record.cache_floor is None else record.cache_floor,
                cache_cap=max(cap, record.cache_floor or 0.0),
                pinned=pinned if record.max_pinned is None else record.max_pinned,
            )
            limits[name] = Limits(record.max_requests or share, record.tokens_per_minute, record.max_body_size)
        self._tenants, self._told = tenants, False
        self.public_salt = tenant_salt(file.secret, sealed=self._sealed)
        self._callers = [
            (bytes.fromhex(key.sha256), Caller(tenants[key.tenant], limits[key.tenant], key.admin, key.id))
            for key in file.keys
        ]

    def _default_parts(self, file: keys_file.KeysFile) -> tuple[float, float]:
        """Floor, and part of what may be pinned, of a tenant that the file gives none."""
        records = file.tenants.values()
        without = sum(record.cache_floor is None for record in records)
        floors = min(self._floors, 1 - sum(record.cache_floor or 0.0 for record in records))
        # One part more: public prefixes are pinned, too.
        others = 1 + sum(record.max_pinned is None for record in records)
        pinned = 1 - sum(record.max_pinned or 0.0 for record in records)
        return max(0.0, floors) / max(1, without), max(0.0, pinned) / others

    def refresh(self) -> None:
        """Read the file again if it is another one than before."""
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._take(keys_file.load(self._path))
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.info("read %d API keys of %d tenants", len(self._callers), len(self._tenants))

    async def tell(self, listener: Callable[[list[Tenant]], Awaitable[None]]) -> None:
        if not self._told:
            self._told = True
            await listener(list(self._tenants.values()))

    def tenants(self) -> list[Tenant]:
        self.refresh()
        return list(self._tenants.values())

    def identify(self, headers: Headers) -> Caller | None:
        self.refresh()
        key = _presented_key(headers)
        if key is None:
            return None
        digest = bytes.fromhex(keys_file.hash_key(key))
        found: Caller | None = None
        # All are compared, whichever it is, each in constant time.
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def tenant_salt(secret: str, *, sealed: bool = False) -> bytes:
    """What a tenant's secret (hex) puts into the namespaces of its pages; tells nothing about the secret."""
    return blake3(b"sealed namespace" if sealed else b"page namespace", key=bytes.fromhex(secret)).digest()


def _presented_key(headers: Headers) -> str | None:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer":
        return value or None
    if scheme.lower() == "basic":  # a browser, with the key as password
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2] or None
        except ValueError:
            return None
    return headers.get("x-api-key") or None


class Authentication:
    """Lets only callers through, and says who they are. Everything not named in this module is for admins.

    Args:
        app: what is behind it.
        access: knows the callers.
        listener: told of tenants that came or went, before anything of theirs is let through.
    """

    def __init__(self, app: ASGIApp, access: Access, listener: Callable[[list[Tenant]], Awaitable[None]]) -> None:
        self.app = app
        self.access = access
        self.listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._admit(scope)
            await self.access.tell(self.listener)
            if refusal is not None:
                await refusal.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _admit(self, scope: Scope) -> ApiError | None:
        path, headers = scope["path"], Headers(scope=scope)
        basic = headers.get("authorization", "").lower().startswith("basic")
        # Browsers send such credentials by themselves, with requests that other sites made them send too.
        caller = None if basic and scope["method"] not in ("GET", "HEAD") else self.access.identify(headers)
        if path in OPEN_PATHS or path == PAGE or path.startswith(f"{PAGE}/"):
            caller = caller or Caller(admin=False)
        elif caller is None:
            return _refusal(headers, browser=not path.startswith("/v1/"))
        elif not caller.admin and not _is_for_tenants(path):
            return ApiError(403, "This needs an admin key.", "invalid_request_error", None, "insufficient_permissions")
        scope[_CALLER] = caller
        return None


def caller_of(scope: Scope) -> Caller:
    """Who made the request that this is the scope of."""
    caller = scope[_CALLER]
    assert isinstance(caller, Caller)
    return caller


def find_caller(scope: Scope) -> Caller | None:
    """``caller_of`` a request that may not have come so far; None then."""
    return scope.get(_CALLER)


def caller(http: HttpRequest) -> Caller:
    """Who made a request."""
    return caller_of(http.scope)


def _is_for_tenants(path: str) -> bool:
    return path.startswith(TENANT_PATHS) and not path.startswith(ADMIN_PATHS)


def _refusal(headers: Headers, *, browser: bool) -> ApiError:
    challenge = _BROWSER_CHALLENGE if browser else _CHALLENGE
    if "authorization" in headers or "x-api-key" in headers:
        return ApiError(401, "Incorrect API key provided.", "invalid_request_error", None, "invalid_api_key", challenge)
    return ApiError(
        401,
        "You didn't provide an API key. Give it in an Authorization header: 'Authorization: Bearer YOUR_KEY'.",
        "invalid_request_error",
        None,
        "missing_api_key",
        challenge,
    )
