"""The torch runner: computes the engine's steps with a real model over pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from pagetrie.engine.runner import SampleSpec, SequenceResult, SequenceStep, StepPlan
from pagetrie.errors import ConfigError
from pagetrie.models.decoder import Decoder
from pagetrie.models.linear import FloatWeights, QuantizedWeights, WeightDtype
from pagetrie.runner.attention import Share
from pagetrie.runner.native_attention import AttentionKind, attention_planner, native_planner, set_threads
from pagetrie.runner.sampler import sample, token_logprobs
from pagetrie.runner.storage import KvDtype, PageStorage
from pagetrie.runner.threads import physical_cores

if TYPE_CHECKING:
    from pagetrie.models.checkpoint import Checkpoint

Forward: TypeAlias = Callable[[torch.Tensor, torch.Tensor, int, Sequence[Share]], torch.Tensor]
"""Token ids, positions, one past the highest, shares  ->  hidden states [tokens, hidden_size]."""

_LOGITS_BYTES = 32 << 20
"""Most bytes of logits that prompt log-probabilities hold at a time."""


class ModelRunner:
    """Computes steps with a model's weights and a pool of pages; implements ``engine.runner.Runner``.

    Args:
        checkpoint: the model.
        num_pages: pages in the pool.
        page_size: tokens in a page.
        weights: how to hold the weights (see ``models.linear`` and ``models.quantized``).
        kv_dtype: how to hold keys and values.
        attention: what computes attention: the native kernels, the torch reference, or the kernels where they fit.
        threads: threads to compute with, None for one per physical core. torch has one pool per process, so the
            number holds for the whole process.

    Attributes:
        storage: the pages.

    Raises:
        ModelLoadError: the checkpoint lacks a tensor, or one doesn't fit.
        ConfigError: an option that can't work on this machine, or too little memory for the pages.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        num_pages: int,
        page_size: int,
        weights: WeightDtype = "fp16",
        kv_dtype: KvDtype = "fp16",
        attention: AttentionKind = "auto",
        threads: int | None = None,
    ) -> None:
        set_threads(threads or physical_cores())
        self.config = checkpoint.config
        self.storage = PageStorage(num_pages, page_size, self.config, kv_dtype)
        with torch.inference_mode():
            if weights == "q8" or weights == "q4":
                self._load_quantized(checkpoint, weights, attention)
            else:
                self._load_float(checkpoint, weights, attention)

    def _load_float(self, checkpoint: Checkpoint, weights: FloatWeights, attention: AttentionKind) -> None:
        plan = attention_planner(self.storage, self.config, attention)
        decoder = Decoder(checkpoint, weights)
        self._forward: Forward = lambda ids, positions, end, shares: decoder.forward(ids, positions, end, plan(shares))
        self._logits = decoder.logits

    def _load_quantized(self, checkpoint: Checkpoint, weights: QuantizedWeights, attention: AttentionKind) -> None:
        if attention == "torch":
            raise ConfigError(
                f"{weights} weights come with native attention; torch attention needs fp16 or fp32 weights"
            )
        plan = native_planner(self.storage, self.config)
        from pagetrie.models.quantized import QuantizedDecoder  # needs the native extension, which is there

        decoder = QuantizedDecoder(checkpoint, weights)

        def forward(ids: torch.Tensor, positions: torch.Tensor, end: int, shares: Sequence[Share]) -> torch.Tensor:
            step = plan(shares)
            return decoder.forward(ids, positions, end, step.plan, step.pages)

        self._forward = forward
        self._logits = decoder.logits

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[SequenceResult]:
        """Compute a step; see ``engine.runner.Runner``.

        Raises:
            EngineError: the model gave something that isn't a number.
        """
        self.storage.copy_pages(plan.copies)
        results = [SequenceResult() for _ in plan.sequences]
        if not plan.sequences:
            return results
        shares = _shares(plan.sequences)
        hidden = self._hidden(plan.sequences, shares)

        rows: list[int] = []
        specs: list[SampleSpec] = []
        owners: list[SequenceResult] = []
        last: list[int] = []
        for step, share, result in zip(plan.sequences, shares, results, strict=True):
            if step.prompt_targets is not None:
                self._add_prompt_logprobs(step, hidden[share.row : share.row + share.n], result)
            if step.samples:
                rows += [len(last)] * len(step.samples)
                specs += step.samples
                owners += [result] * len(step.samples)
                last.append(share.row + share.n - 1)
        if specs:
            logits = self._logits(hidden if len(last) == len(hidden) else hidden[last])
            for owner, token in zip(owners, sample(logits, rows, specs), strict=True):
                owner.samples.append(token)
        return results

    def _hidden(self, steps: Sequence[SequenceStep], shares: Sequence[Share]) -> torch.Tensor:
        token_ids = torch.from_numpy(np.concatenate([np.asarray(step.token_ids, np.int64) for step in steps]))
        positions = torch.from_numpy(np.concatenate([np.arange(s.start, s.start + s.n) for s in shares]))
        end = max(share.start + share.n for share in shares)
        return self._forward(token_ids, positions, end, shares)

    def _add_prompt_logprobs(self, step: SequenceStep, hidden: torch.Tensor, result: SequenceResult) -> None:
        """Log-probabilities of the tokens that follow, by blocks of rows, since logits are large."""
        targets = list(step.prompt_targets or ())
        block = max(1, _LOGITS_BYTES // (4 * self.config.vocab_size))
        for start in range(0, len(targets), block):
            some = targets[start : start + block]
            logits = self._logits(hidden[start : start + len(some)])
            result.prompt_logprobs += token_logprobs(logits, some, [step.prompt_logprobs] * len(some))


def _shares(steps: Sequence[SequenceStep]) -> list[Share]:
    shares = []
    row = 0
    for step in steps:
        shares.append(Share(row, len(step.token_ids), step.start, step.pages))
        row += len(step.token_ids)
    return shares
