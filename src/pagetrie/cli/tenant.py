"""``pagetrie tenant``: who may use the server. Edits the file that ``serve --api-keys`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pagetrie.cli.cache import Folder
from pagetrie.errors import ConfigError
from pagetrie.settings import flag, load_settings

commands = typer.Typer(
    help="Tenants and their API keys, in the file that `serve --api-keys` reads. A running server sees changes with "
    "the next request.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(help="The tenant's name.", metavar="NAME")]
File = Annotated[
    Path | None,
    typer.Option("--api-keys", help="The file of keys; made if it isn't there.", metavar="PATH", show_default=False),
]


@commands.command()
def add(
    name: Name,
    *,
    api_keys: File = None,
    admin: Annotated[bool, typer.Option("--admin", help="The key may see metrics and change what is shared.")] = False,
    weight: Annotated[float | None, typer.Option(help="Share of the work when tenants compete.")] = None,
    cache_floor: Annotated[
        float | None, typer.Option(help="Part of the cache that others can't take from it, 0 to 1.")
    ] = None,
    cache_cap: Annotated[float | None, typer.Option(help="Part of the cache that it may leave filled, 0 to 1.")] = None,
    max_pinned: Annotated[float | None, typer.Option(help="Its part of what may be pinned at all, 0 to 1.")] = None,
    max_requests: Annotated[int | None, typer.Option(help="Prompts in flight.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Prompt and output tokens per minute.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus output, in tokens.")] = None,
    max_body_size: Annotated[str | None, typer.Option(help="Largest request body, such as 2MiB.")] = None,
) -> None:
    """Make a key for a tenant, and the tenant if it is new. The key is shown once and kept nowhere.

    Limits that are given are set for all of the tenant's keys.
    """
    from pydantic import ValidationError

    from pagetrie.server import keys_file

    limits = {
        name: value
        for name, value in (
            ("weight", weight),
            ("cache_floor", cache_floor),
            ("cache_cap", cache_cap),
            ("max_pinned", max_pinned),
            ("max_requests", max_requests),
            ("tokens_per_minute", tokens_per_minute),
            ("max_model_len", max_model_len),
            ("max_body_size", max_body_size),
        )
        if value is not None
    }
    try:
        keys_file.check_tenant_name(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    with keys_file.editing(_file(api_keys)) as file:
        known = file.tenants.get(name)
        try:
            file.tenants[name] = (
                keys_file.new_tenant(**limits)
                if known is None
                else keys_file.TenantRecord.model_validate({**known.model_dump(), **limits})
            )
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            if not detail["loc"]:
                raise ConfigError(detail["msg"]) from None
            raise ConfigError(f"{flag(str(detail['loc'][0]))}: {detail['msg']}, got {detail['input']!r}") from None
        record, key = keys_file.add_key(file, name, admin=admin)
    _show(record.id, name, key)


@commands.command("list")
def show(*, api_keys: File = None) -> None:
    """List tenants, their limits and the ids of their keys."""
    from pagetrie.server import keys_file

    file = keys_file.load(_file(api_keys))
    for name, tenant in sorted(file.tenants.items()):
        limits = tenant.model_dump(exclude={"secret"}, exclude_none=True)
        print(name, *(f"{limit}={value:g}" for limit, value in limits.items()))
        for key in file.keys:
            if key.tenant == name:
                print(f"  {key.id}{' (admin)' if key.admin else ''}")


@commands.command()
def rotate(name: Name, *, api_keys: File = None) -> None:
    """Give a tenant a new key in place of all it has. Its pages stay its own."""
    from pagetrie.server import keys_file

    with keys_file.editing(_file(api_keys)) as file:
        _find(file.tenants, name)
        admin = any(key.admin for key in file.keys if key.tenant == name)
        file.keys = [key for key in file.keys if key.tenant != name]
        record, key = keys_file.add_key(file, name, admin=admin)
    _show(record.id, name, key)


@commands.command()
def rm(
    name: Name,
    *,
    key: Annotated[
        str | None, typer.Option("--key", help="Only the key with this id; the tenant stays.", metavar="ID")
    ] = None,
    api_keys: File = None,
    disk_cache: Folder = None,
) -> None:
    """Remove a tenant: its keys are refused from now on, and its pages are deleted.

    A running server ends its requests and drops its pages in memory and on disk; if none runs, the disk cache is swept
    here. With its secret gone nobody finds what a shared store still has of it.
    """
    from pagetrie.server import keys_file

    with keys_file.editing(_file(api_keys)) as file:
        _find(file.tenants, name)
        record = file.tenants[name]
        gone = [record for record in file.keys if record.tenant == name and key in (None, record.id)]
        if key is None:
            del file.tenants[name]
        elif not gone:
            raise ConfigError(f"tenant {name!r} has no key with the id {key!r}")
        file.keys = [record for record in file.keys if record not in gone]
    print(f"removed {f'tenant {name}' if key is None else f'{key} of tenant {name}'}")
    if key is None:
        _sweep(record.secret, disk_cache)


def _sweep(secret: str, disk_cache: Path | None) -> None:
    from pagetrie.cli.cache import folder_and_secret
    from pagetrie.kv import owner_id
    from pagetrie.kv.tiers.folder import FolderInUseError
    from pagetrie.kv.tiers.opening import sweep
    from pagetrie.server.auth import tenant_salt

    path, shared = folder_and_secret(disk_cache)
    if not path.is_dir():
        return
    owners = [owner_id("tenant", tenant_salt(secret, sealed=sealed)) for sealed in (False, True)]
    try:
        print(f"deleted {sweep(path, owners, shared):,} pages from the disk cache {path}")
    except FolderInUseError:
        print(f"the server that uses the disk cache {path} drops its pages within seconds")


def _file(given: Path | None) -> Path:
    file = given or load_settings({}).api_keys
    if file is None:
        raise ConfigError(f"which file? Give {flag('api_keys')} or set PAGETRIE_API_KEYS")
    return file.expanduser()


def _find(tenants: dict[str, Any], name: str) -> None:
    if name not in tenants:
        raise ConfigError(f"there is no tenant {name[:80]!r}")


def _show(key_id: str, tenant: str, key: str) -> None:
    typer.echo(f"{key_id} of tenant {tenant}; the key is shown this once:", err=True)
    print(key)
