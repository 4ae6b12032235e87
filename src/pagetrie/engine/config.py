"""Limits of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from pagetrie.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of an engine.

    Attributes:
        max_model_len: longest sequence, prompt and output, in tokens.
        max_num_seqs: sequences that run at once (seats).
        max_num_batched_tokens: tokens computed per step.
        max_queue: requests that may wait.
        ageing_steps: steps of waiting that are worth one level of priority; also how long smaller requests may pass
            one that doesn't fit.
        max_bypass: how many may pass it.
        max_contexts: contexts that one owner may keep.
        model_fingerprint: part of every page's namespace.
        public_salt: part of the namespace of public prefixes' pages; known to the server alone.
    """

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queue: int = 1024
    ageing_steps: int = 256
    max_bypass: int = 32
    max_contexts: int = 256
    model_fingerprint: str = ""
    public_salt: bytes = b""

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), or decoding sequences would starve"
            )
