"""``pagetrie cache`` as a user calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagetrie.cli.main import app
from pagetrie.kv.tiers.disk import DiskTier
from pagetrie.kv.tiers.folder import CacheFolder
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
