"""Writes a checkpoint as a Hugging Face folder, for systems that read no GGUF: ``python -m bench.peers_export FOLDER``.

The weights are those of the file, dequantised: every system computes with the same model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pagetrie import paths
from pagetrie.bundled import bundled_model_path
from pagetrie.models.checkpoint import Checkpoint
from pagetrie.models.config import ModelConfig
from pagetrie.models.layout import expected_tensors
from pagetrie.models.loading import load_checkpoint

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export(checkpoint: Checkpoint, folder: Path, dtype: str = "float32") -> None:
    """Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json (with the chat template).

    ``dtype`` is "float32" or "bfloat16".

    Raises:
        ValueError: an architecture or RoPE kind whose config.json isn't written here.
        OSError: the folder can't be written.
    """
    config = checkpoint.config
    tokenizer = checkpoint.tokenizer()
    values = config_json(config, dtype) | {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.chat_template,
        **tokens,
    }
    settings["model_max_length"] = config.max_position
    tensors = {name: checkpoint.tensor(name).to(DTYPES[dtype]).contiguous() for name in expected_tensors(config)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    paths.write_atomically(folder / "tokenizer.json", tokenizer._backend.to_str().encode())
    # config.json comes last: a folder with it is whole.
    for name, content in (("tokenizer_config.json", settings), ("config.json", values)):
        paths.write_atomically(folder / name, json.dumps(content, ensure_ascii=False, indent=1).encode())


def config_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The decoder's sizes in Hugging Face's names. Raises ValueError for what isn't covered."""
    if config.architecture not in ARCHITECTURES or config.rope.kind != "default" or config.rope.freq_factors:
        raise ValueError(f"no config.json for {config.architecture} with RoPE {config.rope.kind}")
    return {
        "architectures": [ARCHITECTURES[config.architecture]],
        "model_type": config.architecture,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps,
        "max_position_embeddings": config.max_position,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers_export", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, help="a GGUF file; default: the bundled model")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    options = parser.parse_args()
    checkpoint = load_checkpoint(options.model or bundled_model_path())
    export(checkpoint, options.folder, options.dtype)
    print(options.folder)


if __name__ == "__main__":
    main()
