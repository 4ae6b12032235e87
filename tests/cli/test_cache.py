"""``pagetrie cache`` as a user calls it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagetrie.cli.main import app
from pagetrie.kv.tiers.disk import DiskTier
from pagetrie.kv.tiers.folder import CacheFolder
from pagetrie.kv.tiers.record import _HEAD, HEAD_BYTES, Checksum, parse_head
from tests.kv.tiers.test_archive import filled, reads, refs_of


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["cache", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tier, _ = filled(tmp_path / "pages")
    tier.close()
    return tmp_path / "pages"


def test_ls_stat_verify_clear(folder: Path) -> None:
    lines = run("ls", "--disk-cache", folder, "--limit", 2).splitlines()
    assert [line.split()[1:3] for line in lines[:2]] == [["20", "tokens"], ["16", "tokens"]]
    assert lines[2] == "and 1 more"
    stat = run("stat", "--disk-cache", folder)
    assert "pages       10, " in stat and "namespaces  2" in stat
    assert run("verify", "--disk-cache", folder) == "10 pages are whole, 0 are damaged\n"
    (segment,) = folder.glob("segment-*")
    raw = bytearray(segment.read_bytes())
    raw[1000] ^= 1
    segment.write_bytes(raw)
    assert "9 pages are whole, 1 are damaged" in run("verify", "--disk-cache", folder, code=1)
    run("clear", "--disk-cache", folder)
    assert run("ls", "--disk-cache", folder) == ""
    assert (folder / "secret").exists()


def test_clear_an_encrypted_cache(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "pages", bytes(32), sealed=True)
    folder.close()
    (tmp_path / "pages" / "segment-000000000001.pages").write_bytes(b"sealed pages")
    assert "deleted 1 files" in run("clear", "--disk-cache", tmp_path / "pages")


def test_export_and_import(folder: Path, tmp_path: Path) -> None:
    key = run("ls", "--disk-cache", folder).split()[0]
    run("export", tmp_path / "one", "--disk-cache", folder, "--prefix", key)
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o600
    assert run("import", tmp_path / "one", "--disk-cache", tmp_path / "there") == "stored 5 pages, skipped 0\n"
    there = DiskTier(CacheFolder(tmp_path / "there"), 10**9)
    assert reads(there, refs_of(there, b"a", 5)) == 5
    there.close()


def claims_a_huge_page(archive: bytes) -> bytes:
    """Its first page says to have a terabyte, under tags that are right."""
    start = archive.index(b"ptpage\r\n")
    page = parse_head(archive[start : start + HEAD_BYTES + 16], Checksum())
    assert page is not None

    front = _HEAD.pack(
        b"ptpage\r\n", 1, 1, 16, 1 << 40, page.ref.key, page.ref.parent, page.ref.namespace, page.page_tag, b""
    )[:-16]
    return archive[:start] + front + Checksum().tag(front, page.ref.tokens) + page.ref.tokens


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:700] + bytes([raw[700] ^ 1]) + raw[701:], "damaged after 0 pages"),
        (lambda raw: raw[: len(raw) // 2], "ends too early"),
        (lambda raw: b"", "no archive"),
        (None, "can't read"),
        (claims_a_huge_page, "damaged after 0 pages"),
        (lambda raw: raw[:12] + b"\xff\xff\xff\xff" + raw[16:], "too long"),
    ],
    ids=["flipped", "truncated", "empty", "missing", "huge page", "endless namespaces"],
)
def test_a_damaged_archive_leaves_what_is_there(
    folder: Path, tmp_path: Path, damage: Callable[[bytes], bytes] | None, message: str
) -> None:
    """I2: an error, and the prefixes that the folder held before are whole."""
    archive, there = tmp_path / "archive", tmp_path / "there"
    run("export", archive, "--disk-cache", folder)
    raw = archive.read_bytes()
    archive.unlink()
    warm, _ = filled(there)
    warm.close()
    if damage is not None:
        archive.write_bytes(damage(raw))
    result = CliRunner().invoke(app, ["cache", "import", str(archive), "--disk-cache", str(there)])
    assert result.exit_code == 1 and message in str(result.exception)
    tier = DiskTier(CacheFolder(there), 10**9)
    kept = [(b"a", 0, 5), (b"a", 100, 4), (b"b", 0, 3)]
    assert all(reads(tier, refs_of(tier, name, count, first=first)) == count for name, first, count in kept)
    tier.close()
    assert "0 are damaged" in run("verify", "--disk-cache", there)


@pytest.mark.parametrize("command", ["ls", "stat", "verify"])
def test_a_folder_that_is_not_there(tmp_path: Path, command: str) -> None:
    result = CliRunner().invoke(app, ["cache", command, "--disk-cache", str(tmp_path / "none")])
    assert result.exit_code == 1 and "can't use" in str(result.exception)
    assert not (tmp_path / "none").exists()


def test_clear_and_import_keep_off_a_folder_in_use(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no archive")
    held = CacheFolder(folder)
    for arguments in (["clear"], ["import", str(tmp_path / "x")]):
        result = CliRunner().invoke(app, ["cache", *arguments, "--disk-cache", str(folder)])
        assert result.exit_code == 1 and "in use by another process" in str(result.exception)
    held.close()
    result = CliRunner().invoke(app, ["cache", "import", str(tmp_path / "x"), "--disk-cache", str(folder)])
    assert result.exit_code == 1 and "no archive" in str(result.exception)
