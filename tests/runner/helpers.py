"""Small models, and a driver that feeds a runner as the engine would."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
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

from pagetrie.engine.params import SamplingParams
from pagetrie.engine.runner import SampleSpec, SequenceStep, StepPlan
from pagetrie.errors import ModelLoadError
from pagetrie.models.config import ModelConfig, RopeConfig
from pagetrie.runner import ModelRunner

VOCAB = 320
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


class ModelCheckpoint:
    """A ``transformers`` model in memory, as a checkpoint."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig) -> None:
        self.config = config
        self.fingerprint = "test"
        self._tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise ModelLoadError(f"no tensor {name}")
        return self._tensors[name]

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def tokenizer(self) -> Any:
        raise NotImplementedError("these models have no vocabulary")


def tiny_model(
    family: str, rope: RopeConfig | None = None, **overrides: Any
) -> tuple[PreTrainedModel, ModelCheckpoint]:
    """A random model of a family in ``transformers`` and the same as a checkpoint.

    Args:
        family: llama, llama-bias, mistral, qwen2 or qwen3.
        rope: scaling; theta 10000 without any if None.
        overrides: arguments of the transformers config.
    """
    rope = rope or RopeConfig()
    sizes = {**_SIZES, "rope_parameters": _rope_parameters(rope), **overrides}
    torch.manual_seed(sum(family.encode()))
    model: PreTrainedModel
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    elif family == "llama-bias":
        model = LlamaForCausalLM(LlamaConfig(**sizes, attention_bias=True))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**{"sliding_window": None, **sizes}))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Larger than the default, so that attention and rope matter; biases and norms are not left at 0 and 1.
            weight.add_(torch.randn_like(weight) * (0.3 if "norm" in name or "bias" in name else 0.1))
    model.eval()
    config = ModelConfig(
        architecture="llama" if family == "llama-bias" else family,  # type: ignore[arg-type]
        name="tiny",
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        n_layers=sizes["num_hidden_layers"],
        n_heads=sizes["num_attention_heads"],
        n_kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        rms_eps=model.config.rms_norm_eps,
        max_position=sizes["max_position_embeddings"],
        rope=rope,
        tie_embeddings=sizes["tie_word_embeddings"],
        qkv_bias=family in ("qwen2", "llama-bias"),
        o_bias=family == "llama-bias",
        qk_norm=family == "qwen3",
        sliding_window=sizes.get("sliding_window"),
    )
    return model, ModelCheckpoint(model, config)


def _rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    common: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        common["factor"] = rope.factor
    if rope.kind == "llama3":
        common |= {
            "original_max_position_embeddings": rope.original_max_position,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    if rope.kind == "yarn":
        common |= {
            "original_max_position_embeddings": rope.original_max_position,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.attention_factor,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
            "truncate": rope.truncate,
        }
    return common


def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """``transformers``' logits at every position, float32 [len(tokens), vocab_size]."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()


def random_tokens(n: int, seed: int, vocab: int = VOCAB) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=n)


@dataclass
class Track:
    """A sequence under test: all its tokens, how many are computed, and its pages."""

    tokens: list[int]
    pages: list[int]
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


class Driver:
    """Feeds a runner and records the logits of every computed position.

    Pages are handed out in random order. Before every step all slots that no computed token owns are poisoned with
    NaN, so that whatever reads one shows.
    """

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.size = runner.storage.page_size
        self.free = list(range(runner.storage.num_pages))
        random.Random(seed).shuffle(self.free)
        self.sequences: list[Track] = []
        self._captured: list[torch.Tensor] = []
        forward, logits = runner._forward, runner._logits

        def capture(*args: Any) -> torch.Tensor:
            hidden = forward(*args)
            self._captured.append(logits(hidden))
            return hidden

        runner._forward = capture

    def add(self, tokens: Sequence[int], shared: Track | None = None, shared_tokens: int = 0) -> Track:
        """A new sequence; it may share the full pages of another's first ``shared_tokens``."""
        assert shared_tokens % self.size == 0
        held = shared_tokens // self.size
        pages = list(shared.pages[:held]) if shared else []
        while len(pages) * self.size < len(tokens):
            pages.append(self.free.pop())
        sequence = Track(list(tokens), pages, computed=shared_tokens)
        if shared:
            sequence.logits = shared.logits[:shared_tokens]
        self.sequences.append(sequence)
        return sequence

    def step(
        self, shares: Sequence[tuple[Track, int]], copies: Sequence[tuple[int, int]] = (), *, poison: bool = True
    ) -> None:
        """Compute the next n tokens of each of some sequences in one step."""
        if poison:
            self.poison()
        steps = [
            SequenceStep(
                s.tokens[s.computed : s.computed + n], s.computed, s.pages[: -(-(s.computed + n) // self.size)]
            )
            for s, n in shares
        ]
        self.runner.execute(StepPlan(list(copies), steps))
        logits, row = self._captured.pop(), 0
        for sequence, n in shares:
            sequence.logits += list(logits[row : row + n])
            sequence.computed += n
            row += n

    def poison(self) -> None:
        storage = self.runner.storage
        live = torch.zeros(storage.num_pages, self.size, dtype=torch.bool)
        for sequence in self.sequences:
            at = torch.arange(sequence.computed)
            live[torch.tensor(sequence.pages, dtype=torch.long)[at // self.size], at % self.size] = True
        storage.keys.masked_fill_(~live[:, None, None, None, :], torch.nan)
        storage.values.masked_fill_(~live[:, None, None, :, None], torch.nan)

    def run_until(self, sequence: Track, end: int, chunk: int = 64) -> None:
        """Compute a sequence's tokens before ``end`` by chunks."""
        while sequence.computed < end:
            self.step([(sequence, min(chunk, end - sequence.computed))])

    def run(self, sequence: Track, chunk: int) -> torch.Tensor:
        """Compute a whole sequence by chunks; its logits at every position."""
        self.run_until(sequence, len(sequence.tokens), chunk)
        return torch.stack(sequence.logits)


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **params)


def spec(
    params: SamplingParams,
    seed: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: Sequence[int] = (),
) -> SampleSpec:
    return SampleSpec(params, seed, prompt, output, banned)
