"""Which tensors a decoder of a given shape must have, by Hugging Face name."""

from __future__ import annotations

from collections.abc import Mapping

from pagetrie.errors import ModelLoadError
from pagetrie.models.config import ModelConfig


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor the decoder reads; projections are [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.n_layers):
        block = f"model.layers.{layer}."
        tensors[block + "input_layernorm.weight"] = (hidden,)
        for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
            tensors[f"{block}self_attn.{name}.weight"] = (rows, hidden)
            if config.qkv_bias:
                tensors[f"{block}self_attn.{name}.bias"] = (rows,)
        tensors[block + "self_attn.o_proj.weight"] = (hidden, q_rows)
        if config.o_bias:
            tensors[block + "self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            tensors[block + "self_attn.q_norm.weight"] = (config.head_dim,)
            tensors[block + "self_attn.k_norm.weight"] = (config.head_dim,)
        tensors[block + "post_attention_layernorm.weight"] = (hidden,)
        tensors[block + "mlp.gate_proj.weight"] = (inner, hidden)
        tensors[block + "mlp.up_proj.weight"] = (inner, hidden)
        tensors[block + "mlp.down_proj.weight"] = (hidden, inner)
    tensors["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    return tensors


def check_tensors(
    source: str, config: ModelConfig, found: Mapping[str, tuple[int, ...]], *, ignored: tuple[str, ...] = ()
) -> None:
    """Check that a file has all tensors of the decoder, in the right shapes, and none that would change its result.

    ``found`` maps Hugging Face names to shapes; names that end with one of ``ignored`` may be there without use.
    Raises ModelLoadError naming the first tensor at fault.
    """
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in found]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelLoadError(f"{source}: tensor {missing[0]!r} is missing{more}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelLoadError(
                f"{source}: tensor {name!r} has shape {list(found[name])}, the configuration needs {list(shape)}"
            )
    # A tensor nobody reads means a model variant that would run, and answer wrongly.
    for name in found:
        if name not in expected and not name.endswith(ignored):
            raise ModelLoadError(f"{source}: tensor {name!r} isn't part of a supported {config.architecture} model")
