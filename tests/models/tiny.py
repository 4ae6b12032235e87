"""Tiny models on disk: the same random weights as a Hugging Face folder and as a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
VOCAB = 288
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def tiny_model(family: str, **overrides: Any) -> PreTrainedModel:
    """A random model of ``transformers``; biases and norms aren't left at 0 and 1."""
    config, model_class = FAMILIES[family]
    torch.manual_seed(7)
    model: PreTrainedModel = model_class(config(**{**SIZES, **overrides}))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of VOCAB tokens, the first three special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the other then there that this is his hat in the inn, and on and on; where were we when winter went west?"
    tokenizer.train_from_iterator([text] * 20, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def write_folder(folder: Path, model: PreTrainedModel, *, shards: int = 1) -> Path:
    """A Hugging Face folder with all that a model needs."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        names = sorted(tensors)
        weight_map = {}
        for shard in range(shards):
            file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = {name: tensors[name] for name in names[shard::shards]}
            save_file(part, folder / file_name)
            weight_map |= dict.fromkeys(part, file_name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """GGUF's name for a Hugging Face tensor name."""
    plain = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in plain:
        return f"{plain[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray[Any, Any]]:
    """Weights as llama.cpp's converter writes them: q and k of a Llama with each head's halves interleaved."""
    config = model.config
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if config.model_type in ("llama", "mistral") and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            rest = values.shape[1:]
            values = values.reshape(heads, 2, values.shape[0] // heads // 2, *rest).swapaxes(1, 2).reshape(values.shape)
        tensors[gguf_name(name)] = np.ascontiguousarray(values)
    return tensors


def gguf_metadata(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes for these models."""
    config, a = model.config, architecture
    backend = tiny_tokenizer()
    merges = json.loads(backend.to_str())["model"]["merges"]
    return {
        "general.name": "tiny",
        f"{a}.block_count": config.num_hidden_layers,
        f"{a}.context_length": config.max_position_embeddings,
        f"{a}.embedding_length": config.hidden_size,
        f"{a}.feed_forward_length": config.intermediate_size,
        f"{a}.attention.head_count": config.num_attention_heads,
        f"{a}.attention.head_count_kv": config.num_key_value_heads,
        f"{a}.attention.key_length": config.head_dim if hasattr(config, "head_dim") else 16,
        f"{a}.attention.value_length": config.head_dim if hasattr(config, "head_dim") else 16,
        f"{a}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{a}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [backend.id_to_token(index) for index in range(VOCAB)],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (VOCAB - 3),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray[Any, Any]],
    types: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """A GGUF file. Arrays named in ``types`` hold raw bytes of that type; None values of the metadata are left out."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
