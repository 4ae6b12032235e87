"""A GGUF file written as a Hugging Face folder is the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.peers_export import config_json, export
from pagetrie.models.config import RopeConfig
from pagetrie.models.layout import expected_tensors
from pagetrie.models.loading import load_checkpoint
from tests.models.tiny import gguf_metadata, gguf_tensors, tiny_model, write_gguf


def write(path: Path, *, tied: bool = False) -> Path:
    model = tiny_model("llama", tie_word_embeddings=tied)
    return write_gguf(path, "llama", gguf_metadata(model, "llama"), gguf_tensors(model))


@pytest.mark.parametrize("tied", [False, True])
def test_the_folder_holds_the_same_model_and_tokenizer(tmp_path: Path, tied: bool) -> None:
    source = load_checkpoint(write(tmp_path / "model.gguf", tied=tied), tmp_path / "cache")
    export(source, tmp_path / "folder")
    copy = load_checkpoint(tmp_path / "folder", tmp_path / "cache")
    assert replace(copy.config, name=source.config.name) == source.config
    for name in expected_tensors(source.config):
        torch.testing.assert_close(copy.tensor(name), source.tensor(name), rtol=0, atol=0)
    ours, theirs = source.tokenizer(), copy.tokenizer()
    text = "<|im_start|>user\nHello, world é 123<|im_end|>\n"
    assert theirs.encode(text) == ours.encode(text)
    assert (theirs.chat_template, theirs.eos_id, theirs.bos_id) == (ours.chat_template, ours.eos_id, ours.bos_id)


def test_what_has_no_config_is_refused(tmp_path: Path) -> None:
    config = load_checkpoint(write(tmp_path / "model.gguf"), tmp_path / "cache").config
    assert config_json(config, "bfloat16")["torch_dtype"] == "bfloat16"
    with pytest.raises(ValueError, match=r"no config\.json for llama with RoPE yarn"):
        config_json(replace(config, rope=RopeConfig(kind="yarn")), "float32")
    with pytest.raises(ValueError, match=r"no config\.json for qwen3"):
        config_json(replace(config, architecture="qwen3"), "float32")
