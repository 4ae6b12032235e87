"""What quantised weights change: `python -m bench.quality [--windows 16] [--tokens 256]`.

Mean KL divergence from the fp32 model's next-token distribution and agreement on its likeliest token, over windows of
text that lie evenly in the Python reference (`quality_text`). Every weight type sees the same tokens; keys and values
are fp32 throughout, so that only the weights, and the activations that are quantised along with them, differ.

The gate for a weight type to be a default: mean KL at most 0.006, agreement at least 95 %.

`python -m bench.quality --ram-codec int8 k8v4` measures what codecs of pages in memory change (`quality_pages`),
with the weights of `--weights`; `--tokens` then follow a prefix of `--prefix`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F

from bench.quality_pages import compare_codecs, noise
from bench.quality_text import text_windows
from pagetrie import _native
from pagetrie.bundled import bundled_model_path
from pagetrie.kv.tiers.codec import CodecName
from pagetrie.models.checkpoint import Checkpoint
from pagetrie.models.decoder import Decoder
from pagetrie.models.linear import FloatWeights, QuantizedWeights, WeightDtype
from pagetrie.models.loading import load_checkpoint
from pagetrie.models.quantized import QuantizedDecoder

MAX_KL = 0.006
MIN_AGREEMENT = 0.95

Model = Callable[[Sequence[int]], torch.Tensor]
"""Token ids of a window -> log-probabilities [tokens, vocab_size]."""


def float_model(checkpoint: Checkpoint, weights: FloatWeights) -> Model:
    """The torch decoder with plain causal attention."""
    decoder = Decoder(checkpoint, weights)

    def attend(_layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // kv.shape[2]
        keys, values = (kv[:, side].repeat_interleave(group, 1).transpose(0, 1) for side in (0, 1))
        mixed = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, is_causal=True)
        return mixed.transpose(0, 1).reshape(len(q), -1)

    def run(ids: Sequence[int]) -> torch.Tensor:
        hidden = decoder.forward(torch.tensor(ids), torch.arange(len(ids)), len(ids), attend)
        return F.log_softmax(decoder.logits(hidden), -1)

    return run


def quantized_model(checkpoint: Checkpoint, weights: QuantizedWeights) -> Model:
    """The native decoder over one sequence's fp32 pages."""
    decoder, config, page_size = QuantizedDecoder(checkpoint, weights), checkpoint.config, 16

    def run(ids: Sequence[int]) -> torch.Tensor:
        n_pages = -(-len(ids) // page_size)
        data = torch.zeros(n_pages, config.n_layers, 2, config.n_kv_heads, config.head_dim * page_size)
        plan = _native.AttentionPlan(
            page_size,
            np.zeros(1, np.int32),
            np.array([len(ids)], np.int32),
            np.arange(n_pages, dtype=np.int32),
            np.array([0, n_pages], np.int32),
            config.n_heads,
            config.n_kv_heads,
            config.sliding_window or 0,
        )
        pages = _native.KvPages(data, page_size)
        hidden = decoder.forward(torch.tensor(ids), torch.arange(len(ids)), len(ids), plan, pages)
        return F.log_softmax(decoder.logits(hidden), -1)

    return run


def compare(reference: Sequence[torch.Tensor], windows: Sequence[Sequence[int]], model: Model) -> dict[str, float]:
    """Mean KL, the worst window's mean KL, and agreement on the likeliest token."""
    divergences, agreements = [], []
    for expected, ids in zip(reference, windows, strict=True):
        actual = model(ids)
        divergences.append(float((expected.exp() * (expected - actual)).sum(-1).mean()))
        agreements.append(float((expected.argmax(-1) == actual.argmax(-1)).float().mean()))
    return {
        "mean_kl": sum(divergences) / len(divergences),
        "worst_window_kl": max(divergences),
        "agreement": sum(agreements) / len(agreements),
    }


def print_weights(checkpoint: Checkpoint, options: argparse.Namespace) -> dict[str, Any]:
    """Print a row per type of weights; returns all figures."""
    results = {}
    with torch.inference_mode():
        windows = text_windows(checkpoint, options.windows, options.tokens)
        exact = float_model(checkpoint, "fp32")
        reference = [exact(ids) for ids in windows]
        print("| weights | mean KL | worst window | top-1 agreement | within the gate |")
        print("| --- | --- | --- | --- | --- |")
        for name, make in (
            ("fp16", lambda: float_model(checkpoint, "fp16")),
            ("q8", lambda: quantized_model(checkpoint, "q8")),
            ("q4", lambda: quantized_model(checkpoint, "q4")),
        ):
            result = results[name] = compare(reference, windows, make())
            good = result["mean_kl"] <= MAX_KL and result["agreement"] >= MIN_AGREEMENT
            print(
                f"| {name} | {result['mean_kl']:.2g} | {result['worst_window_kl']:.2g} | {result['agreement']:.2%} | "
                f"{'yes' if good else 'no'} |",
                flush=True,
            )
    return results


def print_codecs(checkpoint: Checkpoint, options: argparse.Namespace) -> dict[str, Any]:
    """Print a row per codec, and one for what is noise; returns all figures."""
    sizes = {"windows": options.windows, "prefix": options.prefix, "rest": options.tokens, "weights": options.weights}
    print(f"weights {options.weights}: {options.windows} windows, {options.prefix} tokens and {options.tokens} scored")
    print("| pages | bytes | mean KL | p99 KL | top-1 agreement | perplexity | within the gate |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    found = {f"{name} in memory": each for name, each in compare_codecs(checkpoint, options.ram_codec, **sizes).items()}
    gates = [
        ("yes" if each.within_gate(name) else "no")
        for name, each in zip(options.ram_codec, found.values(), strict=True)
    ]
    found["fp16 in place of fp32"] = noise(checkpoint, **sizes)
    for (name, each), gate in zip(found.items(), [*gates, ""], strict=True):
        print(
            f"| {name} | {each.page_bytes:,} | {each.mean_kl:.2g} | {each.p99_kl:.2g} | {each.agreement:.2%} | "
            f"{each.perplexity:+.2%} | {gate} |"
        )
    return {name: asdict(each) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file or folder; default: the bundled model")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--ram-codec", nargs="+", choices=get_args(CodecName), help="codecs to compare, not weights")
    parser.add_argument("--weights", choices=get_args(WeightDtype), default="fp16", help="with --ram-codec")
    parser.add_argument("--prefix", type=int, default=512, help="with --ram-codec: tokens that go through memory")
    parser.add_argument("--json", type=Path, default=None, help="also write the results there")
    options = parser.parse_args()
    checkpoint = load_checkpoint(options.model or bundled_model_path())
    results = (print_codecs if options.ram_codec else print_weights)(checkpoint, options)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
