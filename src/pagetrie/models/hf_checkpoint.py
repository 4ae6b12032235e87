"""A model in a Hugging Face folder: config.json, safetensors weights, tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pagetrie.errors import ModelLoadError
from pagetrie.models.checkpoint import QuantizedTensor
from pagetrie.models.config import ModelConfig
from pagetrie.models.fingerprint import fingerprint
from pagetrie.models.hf_config import model_config
from pagetrie.models.layout import check_tensors
from pagetrie.models.safetensors_file import DTYPES, SafetensorsFile, StoredTensor
from pagetrie.text.hf_tokenizer import tokenizer_from_folder
from pagetrie.text.tokenizer import Tokenizer

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class HfCheckpoint:
    """See `pagetrie.models.checkpoint.Checkpoint`. Raises ModelLoadError if the folder can't be served."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        config_path = folder / "config.json"
        if not config_path.is_file():
            raise ModelLoadError(f"{folder}: has no config.json (nor a GGUF file), so it isn't a model folder")
        self._config_bytes = _read(config_path)
        self._raw_config = _json_object(config_path, self._config_bytes)
        config = model_config(str(config_path), self._raw_config, folder.resolve().name)
        self._files = _weight_files(folder)
        self._tensors: dict[str, tuple[SafetensorsFile, StoredTensor]] = {}
        for file in self._files:
            for name, tensor in file.tensors.items():
                if name in self._tensors:
                    raise ModelLoadError(
                        f"{file.data.path}: tensor {name!r} is also in {self._tensors[name][0].data.path.name}"
                    )
                self._tensors[name] = (file, tensor)
        shapes = {name: tensor.shape for name, (_, tensor) in self._tensors.items()}
        # Some files keep a copy of tied embeddings, or the rope's frequencies.
        ignored = (".rotary_emb.inv_freq", *(("lm_head.weight",) if config.tie_embeddings else ()))
        check_tensors(str(folder), config, shapes, ignored=ignored)
        for file, tensor in self._tensors.values():
            if tensor.dtype not in DTYPES and not tensor.name.endswith(ignored):
                raise ModelLoadError(
                    f"{file.data.path}: tensor {tensor.name!r} is stored as {tensor.dtype}, which isn't supported "
                    f"(supported: {', '.join(DTYPES)})"
                )
        self._config = config
        if not (folder / "tokenizer.json").is_file():
            raise ModelLoadError(f"{folder}: has no tokenizer.json (a tokenizer.model alone can't be read)")

    @property
    def config(self) -> ModelConfig:
        return self._config

    @cached_property
    def fingerprint(self) -> str:
        tensors = sorted(self._tensors.values(), key=lambda entry: entry[1].name)
        descriptions = [self._config_bytes, *(file.header for file in self._files)]
        return fingerprint(descriptions, ((file.data, t.offset, t.n_bytes) for file, t in tensors))

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def quantized(self, name: str) -> QuantizedTensor | None:
        return None

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise ModelLoadError(f"{self._folder}: tensor {name!r} is missing")
        file, tensor = self._tensors[name]
        return file.read(tensor)

    def tokenizer(self) -> Tokenizer:
        generation_path = self._folder / "generation_config.json"
        generation = _json_object(generation_path, _read(generation_path)) if generation_path.is_file() else {}
        end_ids = _ids(generation.get("eos_token_id")) | _ids(self._raw_config.get("eos_token_id"))
        return tokenizer_from_folder(self._folder, vocab_size=self._config.vocab_size, end_ids=end_ids)


def _weight_files(folder: Path) -> list[SafetensorsFile]:
    """The opened weight files in a fixed order, as the index lists them if there is one."""
    index_path = folder / _INDEX
    if (folder / _SINGLE).is_file():
        return [SafetensorsFile(folder / _SINGLE)]
    if index_path.is_file():
        weight_map = _json_object(index_path, _read(index_path)).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise ModelLoadError(f"{index_path}: has no weight_map (corrupt)")
        files = []
        for shard in sorted({str(name) for name in weight_map.values()}):
            if Path(shard).name != shard:
                raise ModelLoadError(f"{index_path}: {shard!r} isn't a file name in this folder")
            if not (folder / shard).is_file():
                raise ModelLoadError(f"{folder}: shard {shard} is missing ({_INDEX} lists it)")
            files.append(SafetensorsFile(folder / shard))
        held = {name: file.data.path.name for file in files for name in file.tensors}
        for name, shard in weight_map.items():
            if held.get(name) != shard:
                raise ModelLoadError(f"{folder / str(shard)}: tensor {name!r} isn't in it, but {_INDEX} says so")
        return files
    pickled = next((path.name for pattern in _PICKLED for path in sorted(folder.glob(pattern))), None)
    if pickled is not None:
        raise ModelLoadError(
            f"{folder}: has its weights only as a pickle ({pickled}), which can run code when loaded; "
            "convert them to safetensors"
        )
    raise ModelLoadError(f"{folder}: has no weights ({_SINGLE} or {_INDEX})")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path}: can't be read: {error.strerror}") from error


def _json_object(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: isn't valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object")
    return value


def _ids(value: Any) -> frozenset[int]:
    """eos_token_id: a number, a list of them, or nothing."""
    return frozenset(item for item in (value if isinstance(value, list) else [value]) if type(item) is int)
