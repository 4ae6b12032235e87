"""What a request asks of sampling, checked once at the boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

from pagetrie.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_CHOICES = 128
MAX_CACHE_TTL = 7 * 86_400

_UNUSED_BY_BEAMS: Mapping[str, tuple[object, ...]] = {
    "min_tokens": (0,),
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
    "stop": ((), []),
}
"""Parameters that a beam search has no use for, and the values that ask for nothing."""

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    The order of operations on a row of logits follows vLLM: logit_bias, banned tokens (min_tokens),
    repetition / presence / frequency penalties, temperature, min_p, top_k, top_p. ``temperature=0`` is greedy.

    Attributes:
        n: choices per prompt; they share the prompt's pages.
        max_tokens: tokens to generate per choice; None means as many as the context holds.
        min_tokens: end-of-sequence and stop ids are banned until this many tokens exist.
        temperature: >= 0; 0 is greedy.
        top_p: nucleus mass, in (0, 1].
        top_k: keep the k likeliest; 0 or -1 keeps all.
        min_p: keep tokens at least this fraction as likely as the likeliest, in [0, 1].
        seed: makes a request reproducible; None draws one.
        repetition_penalty: in [0.01, 100], over prompt and output (HF's form).
        presence_penalty, frequency_penalty: in [-2, 2], over the output.
        logit_bias: token id -> additive bias in [-100, 100].
        stop: strings that end the text; not part of it.
        stop_token_ids: ids that end the text; not part of it.
        ignore_eos: don't stop at the model's end-of-sequence tokens.
        logprobs: None for none, else how many alternatives per token (0 gives the chosen token's only).
        prompt_logprobs: the same for the prompt's tokens; such requests bypass the prefix cache's hits.
        skip_special_tokens: leave special tokens out of the text.
        beam_width: beams of a beam search, of which the best ``n`` are returned; 0 for none. Ending tokens and
            max_tokens end a beam; nothing is drawn, so what shapes a draw must be left alone, and so must ``stop``.
        length_penalty: beams are ranked by log-probability / length ** length_penalty.
        early_stopping: when to end a beam search: True, False or "never"; see ``BeamSearch``.
        use_prefix_cache: False computes everything anew and stores nothing.
        cache_ttl: seconds for which its prefix should stay cached, more than 0 and at most a week: a hint that only the
            ``ttl`` eviction policy heeds.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    use_prefix_cache: bool = True
    cache_ttl: float | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _in_range("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidRequestError(f"max_tokens must be at least 0, got {self.max_tokens}", param="max_tokens")
        if self.min_tokens < 0:
            raise InvalidRequestError(f"min_tokens must be at least 0, got {self.min_tokens}", param="min_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", param="min_tokens"
            )
        _in_range("temperature", self.temperature, 0.0, 1e6)
        if not (isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise InvalidRequestError(f"top_p must be in (0, 1], got {self.top_p}", param="top_p")
        if self.top_k < -1:
            raise InvalidRequestError(f"top_k must be at least -1, got {self.top_k}", param="top_k")
        _in_range("min_p", self.min_p, 0.0, 1.0)
        # Beyond these a penalised logit could overflow, and with it the step of everyone else.
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.cache_ttl is not None and not 0 < self.cache_ttl <= MAX_CACHE_TTL:
            raise InvalidRequestError(
                f"cache_ttl must be more than 0 and at most {MAX_CACHE_TTL} seconds, got {self.cache_ttl:g}",
                param="cache_ttl",
            )
        _at_most("logit_bias", len(self.logit_bias), MAX_LOGIT_BIASES, "entries")
        for token, bias in self.logit_bias.items():
            if not (isfinite(bias) and -100.0 <= bias <= 100.0):
                raise InvalidRequestError(
                    f"logit_bias values must be in [-100, 100], got {bias} for token {token}", param="logit_bias"
                )
        _at_most("stop", len(self.stop), MAX_STOP_STRINGS, "strings")
        _at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise InvalidRequestError("stop strings must be non-empty strings", param="stop")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _in_range(name, value, 0, MAX_LOGPROBS)
        self._check_beams()

    def _check_beams(self) -> None:
        _in_range("beam_width", self.beam_width, 0, MAX_CHOICES)
        _in_range("length_penalty", self.length_penalty, -10.0, 10.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequestError(
                f"early_stopping must be true, false or 'never', got {self.early_stopping!r}", param="early_stopping"
            )
        if not self.beam_width:
            for name, asked in (
                ("length_penalty", self.length_penalty != 1.0),
                ("early_stopping", self.early_stopping),
            ):
                if asked:
                    raise InvalidRequestError(f"{name} needs a beam search; give beam_width", param=name)
            return
        if self.n > self.beam_width:
            raise InvalidRequestError(f"n ({self.n}) must not exceed beam_width ({self.beam_width})", param="n")
        for name, plain in _UNUSED_BY_BEAMS.items():
            if getattr(self, name) not in plain:
                raise InvalidRequestError(f"{name} can't be combined with a beam search", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not (isfinite(value) and low <= value <= high):
        raise InvalidRequestError(f"{name} must be between {low} and {high}, got {value}", param=name)


def _at_most(name: str, count: int, limit: int, what: str) -> None:
    if count > limit:
        raise InvalidRequestError(f"{name} may hold at most {limit} {what}, got {count}", param=name)
