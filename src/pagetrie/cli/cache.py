"""``pagetrie cache``: look into the disk cache, check it, empty it, carry prefixes to another machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from pagetrie.errors import ConfigError
from pagetrie.paths import cache_dir
from pagetrie.settings import Settings, format_size, load_settings

if TYPE_CHECKING:
    from pagetrie.kv.tiers.folder import CacheFolder

app = typer.Typer(
    help="Look into the disk cache, check it, empty it, carry prefixes to another machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Folder = Annotated[
    Path | None,
    typer.Option("--disk-cache", help="The cache's folder. [default: ~/.cache/pagetrie/pages]", show_default=False),
]


@app.command("ls")
def list_prefixes(
    disk_cache: Folder = None,
    *,
    limit: Annotated[int, typer.Option("--limit", help="Most lines to print; 0 for all.", min=0)] = 20,
) -> None:
    """List the longest stored prefixes: key of the last page, tokens, size."""
    from pagetrie.kv.tiers.archive import look_into

    prefixes = look_into(_look(disk_cache)).prefixes()
    for prefix in prefixes[: limit or None]:
        broken = "" if prefix.complete else "  (its beginning is gone)"
        print(f"{prefix.key.hex()[:16]}  {prefix.tokens:>7,} tokens  {format_size(prefix.bytes):>10}{broken}")
    if limit and len(prefixes) > limit:
        print(f"and {len(prefixes) - limit} more")


@app.command("stat")
def show_numbers(disk_cache: Folder = None) -> None:
    """Print how much is stored."""
    from pagetrie.kv.tiers.archive import look_into

    folder = _look(disk_cache)
    contents = look_into(folder)
    heads = [head for _, _, head in contents.pages.values()]
    print(f"folder      {folder.path}")
    print(f"pages       {len(heads):,}, {format_size(sum(head.page_bytes for head in heads))}")
    print(f"files       {contents.segments:,}, {format_size(contents.file_bytes)}")
    print(f"prefixes    {len(contents.prefixes()):,}")
    print(f"namespaces  {len({head.ref.namespace for head in heads}):,}")
    if contents.useless:
        print(f"useless     {len(contents.useless):,} files of another version or secret; the next server drops them")


@app.command()
def verify(disk_cache: Folder = None) -> None:
    """Read and check every page; exit code 1 if one is damaged. A server drops such pages when it meets them."""
    from pagetrie.kv.tiers.archive import look_into

    contents = look_into(_look(disk_cache))
    damaged = list(contents.broken())
    for key in damaged:
        print(f"damaged: {key.hex()[:16]}")
    print(f"{len(contents.pages) - len(damaged):,} pages are whole, {len(damaged):,} are damaged")
    if damaged or contents.useless:
        raise typer.Exit(1)


@app.command()
def clear(disk_cache: Folder = None) -> None:
    """Delete every stored page. The secret stays."""
    from pagetrie.kv.tiers.disk import segment_paths
    from pagetrie.kv.tiers.folder import CacheFolder

    settings, path = _settings(disk_cache)
    folder = CacheFolder(path, _secret(settings), sealed=CacheFolder.is_sealed(path))
    paths = segment_paths(folder.path)
    size = sum(path.stat().st_size for path in paths)
    for path in paths:
        path.unlink()
    folder.close()
    print(f"deleted {len(paths):,} files, {format_size(size)}")


@app.command("export")
def export_pages(
    archive: Annotated[Path, typer.Argument(help="The file to write; - for stdout.", metavar="FILE")],
    disk_cache: Folder = None,
    *,
    prefix: Annotated[
        str | None,
        typer.Option("--prefix", help="Only this prefix: the start of a key that ls shows.", metavar="KEY"),
    ] = None,
) -> None:
    """Write stored prefixes to a file, for ``pagetrie cache import`` on another machine with the same model."""
    from pagetrie.kv.tiers.archive import export

    folder = _look(disk_cache)
    try:
        only = bytes.fromhex(prefix) if prefix is not None else None
    except ValueError:
        raise ConfigError(f"--prefix takes an even number of hexadecimal digits, got {prefix!r}") from None
    with _writing(archive) as file:
        count = export(folder, file, only)
    print(f"wrote {count:,} pages", file=sys.stderr)


@app.command("import")
def import_pages(
    archive: Annotated[Path, typer.Argument(help="A file from export; - for stdin.", metavar="FILE")],
    disk_cache: Folder = None,
    *,
    disk_cap: Annotated[str | None, typer.Option("--disk-cap", help="As for serve.", metavar="SIZE")] = None,
) -> None:
    """Store the prefixes of a file. No server may be using the folder."""
    from pagetrie.kv.tiers.archive import unpack
    from pagetrie.kv.tiers.disk import DiskTier
    from pagetrie.kv.tiers.folder import CacheFolder

    settings, path = _settings(disk_cache, disk_cap)
    try:
        file = sys.stdin.buffer if str(archive) == "-" else archive.open("rb")
    except OSError as error:
        raise ConfigError(f"can't read {archive}: {error.strerror}") from error
    with file:
        tier = DiskTier(CacheFolder(path, _secret(settings)), settings.disk_cap)
        try:
            stored, skipped = unpack(tier, file)
        finally:
            tier.close()
    print(f"stored {stored:,} pages, skipped {skipped:,}")


def _settings(disk_cache: Path | None, disk_cap: str | None = None) -> tuple[Settings, Path]:
    settings = load_settings({"disk_cache": disk_cache, "disk_cap": disk_cap})
    return settings, (settings.disk_cache or (settings.cache_dir or cache_dir()) / "pages").expanduser()


def _secret(settings: Settings) -> bytes | None:
    from pagetrie.kv.tiers.opening import derive_secret

    shared = settings.store_secret if settings.store is not None else None
    return derive_secret(shared.get_secret_value()) if shared is not None else None


def folder_and_secret(disk_cache: Path | None) -> tuple[Path, bytes | None]:
    """The disk cache that a server with the same settings uses, and the secret if that isn't the folder's own."""
    settings, path = _settings(disk_cache)
    return path, _secret(settings)


def _look(disk_cache: Path | None) -> CacheFolder:
    from pagetrie.kv.tiers.folder import CacheFolder

    settings, path = _settings(disk_cache)
    return CacheFolder(path, _secret(settings), look_only=True)


@contextmanager
def _writing(path: Path) -> Iterator[BinaryIO]:
    """Pages say what was asked, so the file is for its owner only; it appears once it is whole."""
    if str(path) == "-":
        yield sys.stdout.buffer
        return
    temporary = path.with_name(path.name + ".part")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            yield file
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
