"""GGUF files that can't be served: one clear line each."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Q
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagetrie.errors import ModelLoadError
from pagetrie.models.loading import load_checkpoint

from .tiny import VOCAB, gguf_metadata, gguf_tensors, tiny_model, write_gguf


@pytest.fixture(scope="module")
def parts() -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    model = tiny_model("llama", num_hidden_layers=1)
    return gguf_metadata(model, "llama"), gguf_tensors(model)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, parts: tuple[dict[str, Any], dict[str, Any]]) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("good") / "m.gguf", "llama", *parts).read_bytes()


def refusal(path: Path) -> str:
    """The message for a file that must be refused: one line that names the file."""
    with pytest.raises(ModelLoadError) as caught:
        load_checkpoint(path, path.parent / "cache").tokenizer()
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def refused_bytes(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    return refusal(path)


def refused_parts(
    tmp_path: Path,
    parts: tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]],
    *,
    architecture: str = "llama",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    types: dict[str, Q] | None = None,
) -> str:
    """Refused with these changes; None takes a key or a tensor away."""
    every = parts[1] | (tensors or {})
    kept = {name: values for name, values in every.items() if values is not None}
    return refusal(write_gguf(tmp_path / "bad.gguf", architecture, parts[0] | (metadata or {}), kept, types))


def test_missing(tmp_path: Path) -> None:
    assert "no such file or folder" in refusal(tmp_path / "nothing.gguf")


def test_something_else(tmp_path: Path) -> None:
    assert "isn't a model folder" in refusal(tmp_path)
    assert "not a GGUF file: 0 bytes" in refused_bytes(tmp_path, b"")
    assert "not a GGUF file: 5 bytes" in refused_bytes(tmp_path, b"hello")
    assert "not a GGUF file: it begins with b'PK" in refused_bytes(tmp_path, b"PK\3\4" + bytes(100))


def test_versions(tmp_path: Path, good: bytes) -> None:
    assert "version 1 isn't supported (only 2, 3)" in refused_bytes(tmp_path, good[:4] + b"\1\0\0\0" + good[8:])
    assert "big-endian" in refused_bytes(tmp_path, good[:4] + b"\0\0\0\3" + good[8:])


def test_absurd_counts_allocate_nothing(tmp_path: Path, good: bytes) -> None:
    huge = struct.pack("<Q", 2**60)
    assert f"a table of {2**60} tensors" in refused_bytes(tmp_path, good[:8] + huge + good[16:])
    assert f"metadata with {2**60} entries" in refused_bytes(tmp_path, good[:16] + huge + good[24:])
    assert "metadata key 0" in refused_bytes(tmp_path, good[:24] + huge + good[32:])


def test_absurd_array_lengths(tmp_path: Path, good: bytes) -> None:
    for key, item_size in ((b"tokenizer.ggml.tokens", 8), (b"tokenizer.ggml.token_type", 4)):
        at = good.index(key) + len(key) + 8
        bad = good[:at] + struct.pack("<Q", 2**50) + good[at + 8 :]
        assert f"needs {2**50 * item_size} bytes" in refused_bytes(tmp_path, bad)


def test_unknown_value_type(tmp_path: Path, good: bytes) -> None:
    at = good.index(b"llama.block_count") + len(b"llama.block_count")
    bad = good[:at] + struct.pack("<I", 77) + good[at + 4 :]
    assert "'llama.block_count' has the unknown type 77" in refused_bytes(tmp_path, bad)


def test_text_that_is_not_utf8(tmp_path: Path, good: bytes) -> None:
    at = good.index(b"llama.block_count")
    assert "isn't UTF-8" in refused_bytes(tmp_path, good[:at] + b"\xff\xfe" + good[at + 2 :])
    at = good.index(b"<|im_start|>")
    message = refused_bytes(tmp_path, good[:at] + b"\xff" + good[at + 1 :])
    assert "'tokenizer.ggml.tokens' holds an item (number 1) that isn't UTF-8" in message


def test_truncated_anywhere(tmp_path: Path, good: bytes) -> None:
    for keep in (24, 40, 200, 2000, good.index(b"blk.0."), len(good) // 2, len(good) - 64):
        assert "truncated" in refused_bytes(tmp_path, good[:keep])


def test_tensor_data_past_the_end_names_the_tensor(tmp_path: Path, good: bytes) -> None:
    message = refused_bytes(tmp_path, good[:-64])
    assert "tensor 'output.weight' ends at byte" in message
    assert f"but the file has {len(good) - 64} bytes" in message


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_header_is_refused_or_harmless(tmp_path: Path, good: bytes, data: st.DataObject) -> None:
    header = good.index(b"blk.0.") + 2000
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    path = tmp_path / "bad.gguf"
    path.write_bytes(bad)
    try:
        checkpoint = load_checkpoint(path, tmp_path / "cache")
        checkpoint.tokenizer()
    except ModelLoadError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message


def test_architecture(tmp_path: Path, parts: Any) -> None:
    message = refused_parts(tmp_path, parts, architecture="gemma3")
    assert "architecture 'gemma3' isn't supported (supported: llama, qwen2, qwen3)" in message


def test_quantisation_type(tmp_path: Path, parts: Any) -> None:
    name = "blk.0.ffn_down.weight"
    raw = np.zeros((64, 96 // 32 * 18), dtype=np.uint8)
    message = refused_parts(tmp_path, parts, tensors={name: raw}, types={name: Q.IQ4_NL})
    assert f"tensor '{name}' is stored as IQ4_NL, which isn't supported (supported: BF16, F16, F32, Q4_0" in message


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.block_count": None}, "'llama.block_count' is missing"),
        ({"llama.block_count": 0}, "'llama.block_count' must be between 1 and 10000, got 0"),
        ({"llama.block_count": 2}, "tensor 'model.layers.1.input_layernorm.weight' is missing (and 8 more)"),
        ({"llama.embedding_length": "wide"}, "'llama.embedding_length' must be an integer, got 'wide'"),
        ({"llama.embedding_length": 128}, "has shape [288, 64], the configuration needs [288, 128]"),
        ({"llama.attention.head_count_kv": 3}, "4 query heads can't share 3 key/value heads"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "must be a finite number, got nan"),
        ({"llama.attention.value_length": 8}, "head sizes must be equal and even, got key 16, value 8"),
        ({"llama.rope.dimension_count": 8}, "rotary 8"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' isn't supported (supported: none, linear"),
        ({"llama.rope.freq_base": -1.0}, "must be greater than 0"),
        ({"llama.expert_count": 8}, "mixture-of-experts models aren't supported"),
        ({"general.alignment": 12}, "general.alignment must be a power of two, got 12"),
        ({"tokenizer.ggml.model": None}, "the file holds no tokenizer"),
        ({"tokenizer.ggml.tokens": None}, "the file holds no tokenizer"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer model 'rwkv' isn't supported (supported: llama, gpt2)"),
        ({"tokenizer.ggml.pre": "klingon"}, "pre-tokenizer 'klingon' isn't supported (supported:"),
        ({"tokenizer.ggml.merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"tokenizer.ggml.merges": ["t h", "zz zz"]}, "the vocabulary is inconsistent"),
        ({"tokenizer.ggml.merges": [1, 2]}, "'tokenizer.ggml.merges' is an array of INT32, not of STRING"),
        ({"tokenizer.ggml.token_type": [1, 2]}, f"token_type has 2 items for {VOCAB} tokens"),
        ({"tokenizer.ggml.eos_token_id": VOCAB}, f"eos_token_id is {VOCAB}, but there are {VOCAB} tokens"),
        ({"tokenizer.ggml.tokens": ["a"] * VOCAB}, "the vocabulary lists 'a' twice"),
        ({"tokenizer.chat_template": 3}, "'tokenizer.chat_template' must be a string, got 3"),
    ],
)
def test_metadata(tmp_path: Path, parts: Any, metadata: dict[str, Any], expected: str) -> None:
    if "general.alignment" in metadata:
        good = write_gguf(tmp_path / "m.gguf", "llama", {**parts[0], "general.alignment": 64}, parts[1]).read_bytes()
        at = good.index(b"general.alignment") + len(b"general.alignment") + 4
        assert expected in refused_bytes(tmp_path, good[:at] + struct.pack("<I", 12) + good[at + 4 :])
        return
    assert expected in refused_parts(tmp_path, parts, metadata=metadata)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"token_embd.weight": None}, "tensor 'token_embd.weight' is missing"),
        ({"blk.0.attn_q.weight": None}, "tensor 'model.layers.0.self_attn.q_proj.weight' is missing"),
        (
            {"blk.0.ffn_up.weight": np.zeros((64, 96), np.float32)},
            "shape [64, 96], the configuration needs [96, 64]",
        ),
        ({"blk.0.ffn_gate_inp.weight": np.zeros((8, 64), np.float32)}, "isn't part of a supported llama model"),
        ({"blk.0.attn_q_norm.weight": np.zeros(16, np.float32)}, "isn't part of a supported llama model"),
        ({"rope_freqs.weight": np.zeros(8, np.float32)}, "'rope_freqs.weight' must hold 8 positive factors"),
        ({"rope_freqs.weight": np.ones(3, np.float32)}, "'rope_freqs.weight' must hold 8 positive factors"),
    ],
)
def test_tensors(tmp_path: Path, parts: Any, tensors: dict[str, Any], expected: str) -> None:
    assert expected in refused_parts(tmp_path, parts, tensors=tensors)


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(good)
    checkpoint = load_checkpoint(path, tmp_path)
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(ModelLoadError, match="it became shorter"):
        checkpoint.tensor("lm_head.weight")
