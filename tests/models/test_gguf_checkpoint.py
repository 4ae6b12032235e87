"""GGUF files: the same model as in a Hugging Face folder, and every supported type and setting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Q
from gguf.quants import quantize

from pagetrie.errors import ModelLoadError
from pagetrie.models.checkpoint import Checkpoint
from pagetrie.models.config import RopeConfig
from pagetrie.models.layout import expected_tensors
from pagetrie.models.loading import load_checkpoint

from .reference_quants import REFERENCE
from .tiny import VOCAB, gguf_metadata, gguf_tensors, tiny_model, write_folder, write_gguf


def write(path: Path, family: str = "llama", *, metadata: dict[str, Any] | None = None, **overrides: Any) -> Path:
    model = tiny_model(family, **overrides)
    return write_gguf(path, family, gguf_metadata(model, family) | (metadata or {}), gguf_tensors(model))


def opened(tmp_path: Path, family: str = "llama", **metadata: Any) -> Checkpoint:
    return load_checkpoint(write(tmp_path / "m.gguf", family, metadata=metadata), tmp_path / "cache")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen2", "qwen3"])
def test_the_same_model_as_folder_and_as_file(tmp_path: Path, family: str, tied: bool) -> None:
    bias = {"attention_bias": True} if family == "llama-bias" else {}
    family = family.removesuffix("-bias")
    model = tiny_model(family, tie_word_embeddings=tied, **bias)
    folder = load_checkpoint(write_folder(tmp_path / "hf", model), tmp_path)
    path = write_gguf(tmp_path / "m.gguf", family, gguf_metadata(model, family), gguf_tensors(model))
    file = load_checkpoint(path, tmp_path)

    epsilon = pytest.approx(folder.config.rms_eps, rel=1e-6)  # GGUF keeps it as float32
    assert file.config.rms_eps == epsilon
    assert replace(file.config, name="hf", rms_eps=folder.config.rms_eps) == folder.config
    assert file.config.tie_embeddings is tied
    assert file.config.qkv_bias is (family == "qwen2" or bool(bias))
    assert file.config.o_bias is bool(bias)
    assert file.config.qk_norm is (family == "qwen3")
    state = model.state_dict()
    names = expected_tensors(file.config)
    assert set(names) == set(state) - ({"lm_head.weight"} if tied else set())
    for name, shape in names.items():
        assert tuple(file.tensor(name).shape) == shape
        assert torch.equal(file.tensor(name), state[name]), name
        assert torch.equal(folder.tensor(name), state[name]), name
    assert file.has_tensor("model.norm.weight")
    assert file.has_tensor("lm_head.weight") is not tied
    with pytest.raises(ModelLoadError, match="tensor 'nothing' is missing"):
        file.tensor("nothing")
    text = "the other hat<|im_end|> ünï 123"
    assert file.tokenizer().encode(text) == folder.tokenizer().encode(text)


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q4_K, Q.Q6_K])
def test_quantised_tensors_have_the_values_that_the_format_defines(tmp_path: Path, kind: Q) -> None:
    model = tiny_model("qwen2", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    tensors = gguf_tensors(model)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(3)
    raw: dict[str, np.ndarray[Any, Any]] = {}
    for name in ("blk.0.attn_q.weight", "blk.0.ffn_down.weight", "token_embd.weight"):
        rows, columns = tensors[name].shape
        data = rng.integers(0, 256, (rows, columns // block, block_bytes), dtype=np.uint8)
        # Scales are float16 somewhere in the block: give them sane values.
        for at in REFERENCE[kind].scale_offsets:
            scales = (rng.random(data.shape[:2]) * 0.1 - 0.05).astype(np.float16)
            data[:, :, at : at + 2] = scales[..., None].view(np.uint8)
        raw[name] = data.reshape(rows, -1)
    path = write_gguf(
        tmp_path / "m.gguf", "qwen2", gguf_metadata(model, "qwen2"), tensors | raw, dict.fromkeys(raw, kind)
    )
    checkpoint = load_checkpoint(path, tmp_path)
    for name, hf_name in (
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
    ):
        values = checkpoint.tensor(hf_name)
        assert values.dtype == torch.float32
        for row in (0, 1, len(values) - 1):
            blocks = raw[name][row].reshape(-1, block_bytes)
            expected = [value for data in blocks for value in REFERENCE[kind].values(bytes(data))]
            np.testing.assert_allclose(values[row].numpy(), np.float32(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "dtype"), [(Q.F16, torch.float16), (Q.BF16, torch.bfloat16), (Q.F32, torch.float32)])
def test_float_tensors_keep_their_type(tmp_path: Path, kind: Q, dtype: torch.dtype) -> None:
    model = tiny_model("llama")
    tensors = gguf_tensors(model)
    kinds = {name: kind for name, values in tensors.items() if values.ndim == 2}
    packed = {name: quantize(values, kinds.get(name, Q.F32)) for name, values in tensors.items()}
    path = write_gguf(tmp_path / "m.gguf", "llama", gguf_metadata(model, "llama"), packed, kinds)
    checkpoint = load_checkpoint(path, tmp_path)
    for name, values in model.state_dict().items():
        found = checkpoint.tensor(name)
        assert found.dtype == (dtype if values.ndim == 2 else torch.float32)
        assert torch.equal(found, values.to(found.dtype)), name


def test_query_and_key_rows_of_a_quantised_llama_are_put_back_in_order(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = gguf_tensors(model)
    kinds = {name: Q.Q8_0 for name in tensors if "attn_q" in name or "attn_k" in name}
    packed = {name: quantize(values, kinds.get(name, Q.F32)) for name, values in tensors.items()}
    path = write_gguf(tmp_path / "m.gguf", "llama", gguf_metadata(model, "llama"), packed, kinds)
    checkpoint = load_checkpoint(path, tmp_path)
    for part in ("q_proj", "k_proj"):
        name = f"model.layers.1.self_attn.{part}.weight"
        assert torch.allclose(checkpoint.tensor(name), model.state_dict()[name], atol=5e-3)


def test_head_size_without_key_length(tmp_path: Path) -> None:
    metadata = {"llama.attention.key_length": None, "llama.attention.value_length": None}
    assert opened(tmp_path, **metadata).config.head_dim == 16


def test_rope_is_plain_by_default(tmp_path: Path) -> None:
    config = opened(tmp_path, **{"llama.rope.freq_base": 5e5, "llama.rope.scaling.type": "none"}).config
    assert config.rope == RopeConfig(theta=5e5)


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_rope_linear(tmp_path: Path, metadata: dict[str, Any]) -> None:
    rope = opened(tmp_path, **metadata).config.rope
    assert (rope.kind, rope.factor, rope.attention_factor) == ("linear", 4.0, None)


def test_rope_yarn(tmp_path: Path) -> None:
    scaling = "qwen2.rope.scaling."
    metadata = {
        scaling + "type": "yarn",
        scaling + "factor": 4.0,
        scaling + "original_context_length": 128,
        scaling + "attn_factor": 0.5,
        scaling + "yarn_beta_fast": 16.0,
    }
    rope = opened(tmp_path, "qwen2", **metadata).config.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 128)
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 1.0)
    assert rope.attention_factor == pytest.approx(0.5 * (0.1 * np.log(4.0) + 1.0))


def test_rope_factors_of_llama3(tmp_path: Path) -> None:
    model = tiny_model("llama")
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    tensors = gguf_tensors(model) | {"rope_freqs.weight": factors}
    path = write_gguf(tmp_path / "m.gguf", "llama", gguf_metadata(model, "llama"), tensors)
    rope = load_checkpoint(path, tmp_path).config.rope
    assert rope.kind == "default"
    assert rope.freq_factors == tuple(factors.tolist())


def test_sliding_window(tmp_path: Path) -> None:
    key = "llama.attention.sliding_window"
    assert opened(tmp_path, **{key: 64}).config.sliding_window == 64
    # A window as wide as the context is none.
    assert opened(tmp_path, **{key: 512}).config.sliding_window is None
    assert opened(tmp_path, **{key: 0}).config.sliding_window is None


def test_per_layer_values_that_agree_count_as_one(tmp_path: Path) -> None:
    assert opened(tmp_path, **{"llama.attention.head_count_kv": [2, 2]}).config.n_kv_heads == 2
    with pytest.raises(ModelLoadError, match="head_count_kv' differs from layer to layer"):
        opened(tmp_path, **{"llama.attention.head_count_kv": [2, 4]})


def test_fingerprint_follows_the_weights_and_not_the_path(tmp_path: Path) -> None:
    one = write(tmp_path / "one.gguf")
    two = tmp_path / "two.gguf"
    two.write_bytes(one.read_bytes())
    first = load_checkpoint(one, tmp_path).fingerprint
    assert len(first) == 64
    assert load_checkpoint(two, tmp_path).fingerprint == first

    model = tiny_model("llama")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.001)  # a little more training: same shapes, same sizes
    retrained = write_gguf(tmp_path / "three.gguf", "llama", gguf_metadata(model, "llama"), gguf_tensors(model))
    assert retrained.stat().st_size == one.stat().st_size
    assert load_checkpoint(retrained, tmp_path).fingerprint != first
    rope = write(tmp_path / "four.gguf", metadata={"llama.rope.freq_base": 20000.0})
    assert load_checkpoint(rope, tmp_path).fingerprint != first


def test_fingerprint_sees_each_tensor(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    first = load_checkpoint(path, tmp_path).fingerprint
    checkpoint = load_checkpoint(path, tmp_path)
    data = bytearray(path.read_bytes())
    for tensor in checkpoint._file.tensors.values():  # type: ignore[attr-defined]
        changed = bytearray(data)
        changed[tensor.offset + tensor.n_bytes - 1] ^= 1
        other = tmp_path / "other.gguf"
        other.write_bytes(changed)
        assert load_checkpoint(other, tmp_path).fingerprint != first, tensor.name


def test_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder / "a.gguf")
    assert load_checkpoint(folder, tmp_path).config.name == "tiny"
    write(folder / "b.gguf")
    with pytest.raises(ModelLoadError, match=r"holds 2 GGUF files \(a.gguf, b.gguf\); name one"):
        load_checkpoint(folder, tmp_path)


def test_sentencepiece_vocabulary(tmp_path: Path) -> None:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", "h", "i", "▁h", "▁hi", *(f"piece{index}" for index in range(VOCAB - 264))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": None,
        "tokenizer.ggml.eos_token_id": None,
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *byte_tokens, *pieces],
        "tokenizer.ggml.token_type": [2, 3, 3, *([6] * 256), *([1] * len(pieces))],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(pieces))],
    }
    tokenizer = opened(tmp_path, **metadata).tokenizer()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (1, 2, {2})
    assert tokenizer.encode("hi hi\n") == [1, 263, 263, 3 + ord("\n")]
    assert tokenizer.decode([1, 263, 263, 13]) == "hi hi\n"
    with pytest.raises(ModelLoadError, match=r"'tokenizer\.ggml\.scores' is missing"):
        opened(tmp_path, **metadata | {"tokenizer.ggml.scores": None})


def test_bundled_model(bundled_model: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(bundled_model, tmp_path)
    config = checkpoint.config
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.max_position, config.tie_embeddings) == (49152, 8192, True)
    assert config.rope == RopeConfig(theta=100000.0)
    for name in ("model.layers.29.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        values = checkpoint.tensor(name)
        assert values.shape == expected_tensors(config)[name]
        assert 0.005 < values.std() < 0.5
        assert torch.isfinite(values).all()
