"""Hugging Face folders: shapes, settings, tokenizer files, and those that can't be served."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagetrie.errors import ModelLoadError
from pagetrie.models.config import ModelConfig, RopeConfig
from pagetrie.models.hf_config import model_config
from pagetrie.models.loading import load_checkpoint

from .tiny import SIZES, TEMPLATE, tiny_model, write_folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("hf") / "tiny-llama", tiny_model("llama"))


@pytest.fixture
def folder(tmp_path: Path, original: Path) -> Path:
    """A folder of one's own, to be damaged."""
    copy = tmp_path / "tiny-llama"
    shutil.copytree(original, copy)
    return copy


def edit(path: Path, **changes: Any) -> None:
    """Change a JSON file; None takes a key away."""
    values = json.loads(path.read_text()) if path.exists() else {}
    values |= changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def refusal(folder: Path) -> str:
    """The message for a folder that must be refused: one line that says where."""
    with pytest.raises(ModelLoadError) as caught:
        load_checkpoint(folder).tokenizer()
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


BASE = {
    **{key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps")},
    **{key: SIZES[key] for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")},
}
NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def config_of(family: str = "llama", **values: Any) -> ModelConfig:
    """What config.json with these values says; the tensors don't matter here."""
    return model_config("config.json", {**BASE, "architectures": [f"{NAMES[family]}ForCausalLM"], **values}, "m")


def refused_config(family: str = "llama", **values: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        config_of(family, **values)
    return str(caught.value)


@pytest.mark.parametrize("family", list(NAMES))
def test_families(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    checkpoint = load_checkpoint(write_folder(tmp_path / "m", model))
    assert checkpoint.config.architecture == family
    assert checkpoint.config.name == "m"
    for name, values in model.state_dict().items():
        assert torch.equal(checkpoint.tensor(name), values), name
    assert checkpoint.config.rope == RopeConfig(theta=model.config.rope_parameters["rope_theta"])


def test_shards(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    folder = write_folder(tmp_path / "m", model, shards=3)
    checkpoint = load_checkpoint(folder)
    for name, values in model.state_dict().items():
        assert torch.equal(checkpoint.tensor(name), values), name
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "shard model-00002-of-00003.safetensors is missing" in refusal(folder)


def test_index_that_lies(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tiny_model("llama"), shards=2)
    index = folder / "model.safetensors.index.json"
    original = json.loads(index.read_text())["weight_map"]
    elsewhere = next(shard for shard in original.values() if shard != original["model.norm.weight"])
    edit(index, weight_map=original | {"model.norm.weight": elsewhere})
    assert "tensor 'model.norm.weight' isn't in it" in refusal(folder)
    edit(index, weight_map=original | {"model.norm.weight": "../model.safetensors"})
    assert "isn't a file name in this folder" in refusal(folder)
    edit(index, weight_map={})
    assert "has no weight_map" in refusal(folder)
    index.write_text("{")
    assert "isn't valid JSON" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types(folder: Path, dtype: torch.dtype) -> None:
    tensors = {name: values.to(dtype) for name, values in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    checkpoint = load_checkpoint(folder)
    for name, values in tensors.items():
        assert checkpoint.tensor(name).dtype == dtype
        assert torch.equal(checkpoint.tensor(name), values)


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tiny_model("llama", tie_word_embeddings=True))
    assert load_checkpoint(folder).config.tie_embeddings
    assert not load_checkpoint(folder).has_tensor("lm_head.weight")
    edit(folder / "config.json", tie_word_embeddings=False)
    assert "tensor 'lm_head.weight' is missing" in refusal(folder)


def test_silent_defaults() -> None:
    llama = config_of()
    assert (llama.head_dim, llama.max_position, llama.rope) == (16, 2048, RopeConfig())
    assert not (llama.tie_embeddings or llama.qkv_bias or llama.o_bias or llama.qk_norm)
    without = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert model_config("c", {**without, "architectures": ["LlamaForCausalLM"]}, "m").n_kv_heads == 4
    assert config_of("qwen3").head_dim == 128
    assert config_of("qwen3", head_dim=32).qk_norm
    assert config_of("qwen2").qkv_bias
    assert not config_of("qwen2").o_bias
    assert config_of("qwen2").max_position == 32768


def test_attention_bias() -> None:
    for family in ("llama", "qwen3"):
        config = config_of(family, attention_bias=True)
        assert config.qkv_bias
        assert config.o_bias


@pytest.mark.parametrize(
    ("family", "values", "expected"),
    [
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 128}, 128),
        ("mistral", {"sliding_window": 4096, "max_position_embeddings": 4096}, None),
        ("llama", {"sliding_window": 128}, None),
        ("qwen2", {"sliding_window": 128}, None),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True}, None),  # from layer 28 on
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0}, 128),
        ("qwen3", {"sliding_window": 128, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 128),
        ("qwen3", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, None),
    ],
)
def test_sliding_window(family: str, values: dict[str, Any], expected: int | None) -> None:
    assert config_of(family, **values).sliding_window == expected


def test_sliding_window_in_some_layers() -> None:
    message = refused_config("qwen2", sliding_window=128, use_sliding_window=True, max_window_layers=1)
    assert "a sliding window in some layers only isn't supported" in message


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling", "rope_scaling, type"])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"rope_type": "default"}, RopeConfig(theta=7e4)),
        ({"rope_type": "linear", "factor": 2.0}, RopeConfig("linear", 7e4, 2.0, 512)),
        ({"rope_type": "llama3", **LLAMA3}, RopeConfig("llama3", 7e4, 8.0, 1024, 1.0, 4.0)),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "attention_factor": 1.5},
            RopeConfig("yarn", 7e4, 4.0, 256, attention_factor=1.5),
        ),
        (
            {"rope_type": "yarn", "factor": 4, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "truncate": False},
            RopeConfig("yarn", 7e4, 4.0, 512, beta_fast=16.0, beta_slow=2.0, mscale=0.7, truncate=False),
        ),
    ],
)
def test_rope(form: str, values: dict[str, Any], expected: RopeConfig) -> None:
    if form == "rope_parameters":
        config = config_of(max_position_embeddings=512, rope_parameters={"rope_theta": 7e4, **values})
    else:
        if form.endswith("type"):
            values = {"type" if key == "rope_type" else key: value for key, value in values.items()}
        config = config_of(max_position_embeddings=512, rope_theta=7e4, rope_scaling=values)
    assert config.rope == expected


def test_yarn_widens_a_context_given_before_scaling() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert config_of(max_position_embeddings=512, rope_scaling=yarn).max_position == 2048
    assert config_of(max_position_embeddings=2048, rope_scaling=yarn).max_position == 2048
    linear = {"rope_type": "linear", "factor": 4.0}
    assert config_of(max_position_embeddings=512, rope_scaling=linear).max_position == 512


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architecture GemmaForCausalLM isn't supported (supported: Llama"),
        ({"architectures": None, "model_type": "bert"}, "architecture model_type 'bert' isn't supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an integer between 1 and 2147483647, got '64'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer between 1 and 10000, got 1000000000"),
        ({"num_attention_heads": 3}, "3 query heads can't share 2 key/value heads"),
        ({"num_attention_heads": 6}, "hidden_size 64 isn't a multiple of num_attention_heads 6"),
        ({"head_dim": 15}, "head_dim must be even, got 15"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be greater than 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' isn't supported (only silu)"),
        ({"mlp_bias": True}, "mlp_bias isn't supported"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights (gptq) aren't supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' isn't supported (supported: default, lin"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "must be greater than low_freq"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -1}}, "rope_scaling.factor must be greater than 0"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "differs between layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor isn't supported"),
    ],
)
def test_configurations_that_are_refused(values: dict[str, Any], expected: str) -> None:
    message = refused_config(**values)
    assert expected in message
    assert message.startswith("config.json: ")


def test_not_a_model_folder(tmp_path: Path) -> None:
    assert "has no config.json (nor a GGUF file), so it isn't a model folder" in refusal(tmp_path)


def test_damaged_config(folder: Path) -> None:
    (folder / "config.json").write_bytes(b'{"architectures": ["Llama')
    assert "isn't valid JSON" in refusal(folder)
    (folder / "config.json").write_text("[" * 100_000)
    assert "isn't valid JSON" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "must hold a JSON object" in refusal(folder)


def test_pickled_weights_are_not_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has no weights (model.safetensors or model.safetensors.index.json)" in refusal(folder)
    torch.save({}, folder / "pytorch_model.bin")
    assert "only as a pickle (pytorch_model.bin)" in refusal(folder)


def test_truncated_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    header_end = 8 + struct.unpack("<Q", data[:8])[0]
    for keep in (0, 4, 9):
        path.write_bytes(data[:keep])
        assert f"{keep} bytes are too few for a safetensors file" in refusal(folder)
    path.write_bytes(data[: header_end - 5])
    assert "not a safetensors file, or truncated: the header's length is given as" in refusal(folder)
    for keep in (header_end, header_end + 10, len(data) - 1):
        path.write_bytes(data[:keep])
        assert f"but the file has {keep} (truncated or corrupt)" in refusal(folder)


def test_weights_that_are_something_else(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "not a safetensors file" in refusal(folder)
    path.write_bytes(struct.pack("<Q", 20) + b"this is not json at all")
    assert "the header isn't JSON" in refusal(folder)
    path.write_bytes(struct.pack("<Q", 2) + b"[]")
    assert "the header isn't a JSON object" in refusal(folder)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"dtype": "F32", "shape": [64], "data_offsets": [0]}, "has a malformed header entry"),
        ({"dtype": "F32", "shape": [-64], "data_offsets": [0, 256]}, "has a malformed header entry"),
        ({"dtype": "F32", "shape": [64.0], "data_offsets": [0, 256]}, "has a malformed header entry"),
        ("norm", "has a malformed header entry"),
        ({"dtype": "F32", "shape": [64], "data_offsets": [0, 128]}, "has 128 bytes, its shape needs 256"),
        ({"dtype": "F32", "shape": [64], "data_offsets": [0, 10**15]}, "(truncated or corrupt)"),
        ({"dtype": "F32", "shape": [2**40], "data_offsets": [0, 256]}, "has 256 bytes, its shape needs 4398046511104"),
        ({"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]}, "has shape [8, 8], the configuration needs [64]"),
        (
            {"dtype": "I8", "shape": [64], "data_offsets": [0, 64]},
            "is stored as I8, which isn't supported (supported: F",
        ),
    ],
)
def test_header_entries(folder: Path, entry: Any, expected: str) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"] = entry
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + length :])
    message = refusal(folder)
    assert expected in message
    assert "'model.norm.weight'" in message


def test_tensors_of_another_variant(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    load_checkpoint(folder)
    tensors["model.layers.0.mlp.down_proj.bias"] = torch.ones(64)
    save_file(tensors, folder / "model.safetensors")
    assert "tensor 'model.layers.0.mlp.down_proj.bias' isn't part of a supported llama model" in refusal(folder)


def test_tokenizer_files(folder: Path) -> None:
    tokenizer = load_checkpoint(folder).tokenizer()
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.bos_token) == (0, 0, "<|endoftext|>")
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.eos_ids == {0, 2}

    edit(folder / "generation_config.json", eos_token_id=[5, 6])
    edit(folder / "config.json", eos_token_id=7)
    assert load_checkpoint(folder).tokenizer().eos_ids == {0, 2, 5, 6, 7}

    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    edit(folder / "tokenizer_config.json", chat_template=named, bos_token={"content": "<|im_start|>"})
    tokenizer = load_checkpoint(folder).tokenizer()
    assert (tokenizer.chat_template, tokenizer.bos_id) == ("plain", 1)

    (folder / "chat_template.jinja").write_text("from the file")
    assert load_checkpoint(folder).tokenizer().chat_template == "from the file"

    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    tokenizer = load_checkpoint(folder).tokenizer()
    assert (tokenizer.chat_template, tokenizer.bos_id, tokenizer.eos_id) == (None, None, None)


def test_add_bos_token(folder: Path) -> None:
    plain = load_checkpoint(folder).tokenizer().encode("then")
    assert plain[0] != 0
    edit(folder / "tokenizer_config.json", add_bos_token=True)
    with_bos = load_checkpoint(folder).tokenizer()
    assert with_bos.encode("then") == [0, *plain]
    assert with_bos.encode("then", add_special=False) == plain
    # tokenizer.json adds one, the settings say no.
    with_bos._backend.save(str(folder / "tokenizer.json"))
    edit(folder / "tokenizer_config.json", add_bos_token=False)
    assert load_checkpoint(folder).tokenizer().encode("then") == plain


def test_tokenizers_that_are_refused(folder: Path) -> None:
    path = folder / "tokenizer.json"
    good = json.loads(path.read_text())
    path.write_text(json.dumps(good | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}))
    assert "neither byte-level BPE nor SentencePiece BPE (its decoder is WordPiece)" in refusal(folder)
    path.write_text(json.dumps(good | {"decoder": None}))
    assert "its decoder is missing" in refusal(folder)
    path.write_text("{}")
    assert "tokenizer.json: can't be read as a tokenizer" in refusal(folder)
    path.unlink()
    assert "has no tokenizer.json" in refusal(folder)
    path.write_text(json.dumps(good))
    edit(folder / "tokenizer_config.json", chat_template=5)
    assert "chat_template must be a string" in refusal(folder)


def test_fingerprint(folder: Path, original: Path) -> None:
    first = load_checkpoint(folder).fingerprint
    assert load_checkpoint(original).fingerprint == first
    tensors = load_file(folder / "model.safetensors")
    retrained = {name: values * 1.001 for name, values in tensors.items()}
    save_file(retrained, folder / "model.safetensors")
    assert load_checkpoint(folder).fingerprint != first
    save_file(tensors, folder / "model.safetensors")
    edit(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 20000.0})
    assert load_checkpoint(folder).fingerprint != first
