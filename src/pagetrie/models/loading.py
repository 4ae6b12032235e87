"""From a path to an opened model."""

from __future__ import annotations

from pathlib import Path

from pagetrie import paths
from pagetrie.errors import ModelLoadError
from pagetrie.models.checkpoint import Checkpoint
from pagetrie.models.gguf_checkpoint import GgufCheckpoint
from pagetrie.models.hf_checkpoint import HfCheckpoint


def load_checkpoint(path: Path, cache_dir: Path | None = None) -> Checkpoint:
    """Open a model: a GGUF file, a Hugging Face folder, or a folder that holds one GGUF file.

    Checks everything but the weights' values: headers, sizes, names, shapes, types, tokenizer. Weights are read
    later, tensor by tensor.

    Args:
        path: the file or folder.
        cache_dir: where a converted tokenizer is kept; the default is `pagetrie.paths.cache_dir`.

    Raises:
        ModelLoadError: with one line that says what is wrong, and where.
    """
    cache = paths.cache_dir() if cache_dir is None else cache_dir
    path = path.expanduser()
    if not path.exists():
        raise ModelLoadError(f"{path}: no such file or folder")
    if path.is_file():
        return GgufCheckpoint(path, cache)
    if (path / "config.json").exists():
        return HfCheckpoint(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise ModelLoadError(f"{path}: holds {len(files)} GGUF files ({names}{', ...' * (len(files) > 4)}); name one")
    return GgufCheckpoint(files[0], cache) if files else HfCheckpoint(path)
