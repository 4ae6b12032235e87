"""The file of API keys: who may use the server, as which tenant, within which limits.

JSON, mode 0600. It holds no key, only SHA-256 hashes of keys (which are 256 random bits, so that no slow hash is
needed), and one random secret per tenant, from which the namespaces of its pages are derived. Deleting a tenant's
secret makes its pages unfindable and, where the cache is encrypted, unreadable.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from pagetrie.errors import ConfigError
from pagetrie.paths import write_atomically
from pagetrie.settings import parse_size

MAX_FILE_BYTES = 16 * 2**20
SECRET_BYTES = 32

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class TenantRecord(_Record):
    """A tenant.

    Attributes:
        secret: 32 random bytes in hex, which nobody but the server learns.
        weight: its share of the work when tenants compete, against the others' weights.
        cache_floor: part of the pool, and of each tier below it, that others can't take from it; None for an equal part
            of what the server guarantees to all of those.
        cache_cap: part of each that it may leave cached; None for the server's own limit.
        max_pinned: its part of the pages that may be pinned at all; None for an equal part.
        max_requests: requests in flight; None for an equal share of the server's queue.
        tokens_per_minute: prompt and output tokens; None for no limit.
        max_model_len: longest prompt plus output, in tokens; None for the server's own limit.
        max_body_size: largest request body, in bytes or as "2MiB"; None for the server's own limit.
    """

    secret: _Hex
    weight: float = Field(default=1.0, gt=0, le=1000)
    cache_floor: float | None = Field(default=None, ge=0, le=1)
    cache_cap: float | None = Field(default=None, ge=0, le=1)
    max_pinned: float | None = Field(default=None, ge=0, le=1)
    max_requests: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    max_model_len: int | None = Field(default=None, ge=2)
    max_body_size: Annotated[int, BeforeValidator(parse_size)] | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _floor_below_cap(self) -> TenantRecord:
        if self.cache_floor is not None and self.cache_cap is not None and self.cache_floor > self.cache_cap:
            raise ValueError(f"cache_floor ({self.cache_floor:g}) is more than cache_cap ({self.cache_cap:g})")
        return self


class KeyRecord(_Record):
    """One API key: its SHA-256 in hex, and what it may do. ``id`` names it where the key itself must not appear."""

    id: str = Field(min_length=1, max_length=64)
    tenant: str
    sha256: _Hex
    admin: bool = False


class KeysFile(_Record):
    """All of it. ``secret`` is the server's own, in hex."""

    version: int = Field(default=1, ge=1, le=1)
    secret: _Hex
    tenants: dict[str, TenantRecord] = {}
    keys: list[KeyRecord] = []

    @model_validator(mode="after")
    def _consistent(self) -> KeysFile:
        for name in self.tenants:
            check_tenant_name(name)
        for name, limit in (("cache_floor", "guaranteed"), ("max_pinned", "allowed to pin")):
            total = sum(getattr(tenant, name) or 0 for tenant in self.tenants.values())
            if total > 1 + 1e-9:
                raise ValueError(
                    f"the tenants are {limit} {total:g} of the cache together: {name} adds up to more than 1"
                )
        ids: set[str] = set()
        for key in self.keys:
            if key.tenant not in self.tenants:
                raise ValueError(f"key {key.id!r} is for a tenant {key.tenant!r} that is not there")
            if key.id in ids:
                raise ValueError(f"two keys have the id {key.id!r}")
            ids.add(key.id)
        return self


def check_tenant_name(name: str) -> None:
    """Raises ValueError for anything but 1 to 63 lower-case letters, digits, dots, dashes and underscores."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"a tenant's name has 1 to 63 of a-z, 0-9, '.', '_' and '-', the first a letter or digit; got {name[:80]!r}"
        )


def hash_key(key: str) -> str:
    """What the file holds of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def load(path: Path) -> KeysFile:
    """Read and check the file.

    Raises:
        ConfigError: it can't be read or something in it is wrong; secrets are never part of the message.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"the API keys file {path} is larger than {MAX_FILE_BYTES} bytes")
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read the API keys file {path}: {error.strerror}") from error
    try:
        return KeysFile.model_validate_json(content)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in detail["loc"])
        raise ConfigError(
            f"the API keys file {path} is wrong{' at ' + where if where else ''}: {detail['msg']}"
        ) from None


def is_private(path: Path) -> bool:
    """Whether nobody but its owner can read the file."""
    return not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)


@contextmanager
def editing(path: Path) -> Generator[KeysFile, None, None]:
    """The file to be changed, made if it isn't there; written when the block ends well, in one step and for its owner
    alone. Editors take turns.

    Raises:
        ConfigError: it can't be read or written, or what it would hold is wrong.
    """
    try:
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"can't write the API keys file {path}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = load(path) if path.exists() else KeysFile(secret=secrets.token_hex(SECRET_BYTES))
        yield file
        try:
            file = KeysFile.model_validate(file.model_dump())
        except ValidationError as error:
            raise ConfigError(error.errors(include_url=False, include_input=False)[0]["msg"]) from None
        write_atomically(path, file.model_dump_json(indent=2, exclude_none=True).encode() + b"\n")
    except OSError as error:
        raise ConfigError(f"can't write the API keys file {path}: {error.strerror}") from error
    finally:
        os.close(lock)


def add_key(file: KeysFile, tenant: str, *, admin: bool = False) -> tuple[KeyRecord, str]:
    """A new key for a tenant of the file, and the key itself, which is kept nowhere."""
    key = f"pt-{secrets.token_urlsafe(32)}"
    taken = {record.id for record in file.keys}
    name = next(name for name in iter(lambda: f"key-{secrets.token_hex(4)}", "") if name not in taken)
    record = KeyRecord(id=name, tenant=tenant, sha256=hash_key(key), admin=admin)
    file.keys.append(record)
    return record, key


def new_tenant(**limits: object) -> TenantRecord:
    """A tenant with a secret of its own. ``limits`` are fields of the record. Raises ValidationError."""
    return TenantRecord.model_validate({"secret": secrets.token_hex(SECRET_BYTES), **limits})
