"""Drawing tokens from logits, and log-probabilities.

A draw is a function of the logits, the parameters, the choice's seed and the number of the draw; nothing is kept
between steps. So preempting a sequence, or batching it with others, leaves its randomness as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import isfinite, log
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pagetrie.engine.params import SamplingParams
from pagetrie.engine.runner import SampleSpec, TokenLogprob
from pagetrie.errors import EngineError

LOWEST_LOGPROB = -9999.0
_CANDIDATES = 256
"""Likeliest tokens to look at first where top_p or min_p, not top_k, decide how many are kept."""

_BLOCK = 16
"""Tokens in a block, when looking for the likeliest."""

Floats: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.int64]


def uniform(seed: int, draw: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for equal arguments on every machine.

    Args:
        seed: any integer; its lowest 64 bits count.
        draw: the number of the draw, from 0.
    """
    key = (seed & (2**64 - 1)).to_bytes(8, "little")
    digest = blake2b(draw.to_bytes(8, "little"), digest_size=8, key=key).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def sample(logits: torch.Tensor, rows: Sequence[int], specs: Sequence[SampleSpec]) -> list[TokenLogprob]:
    """Draw one token per spec.

    Args:
        logits: float32 [n, vocab_size]; not changed.
        rows: the row that each spec draws from; several may draw from one.
        specs: what to draw. Ids outside of the vocabulary name no token and are passed over.

    Returns:
        The tokens in the order of ``specs``; ``logprob`` and ``top`` are filled for those that ask for logprobs.

    Raises:
        EngineError: a row holds NaN or has no finite maximum, so the model failed.
    """
    maxima, best = _maxima(logits)
    if not all(map(isfinite, maxima)):
        raise EngineError("the model's logits are not finite numbers")
    tokens = [best[row] for row in rows]
    special = [i for i, spec in enumerate(specs) if not spec.params.greedy or _adjusts(spec)]
    if special:
        changed = logits.index_select(0, torch.tensor([rows[i] for i in special]))
        for row, i in zip(changed, special, strict=True):
            if _adjusts(specs[i]):
                _adjust(row, specs[i])
        for i, token in zip(special, _draw(changed, [specs[i] for i in special]), strict=True):
            tokens[i] = token

    asked = [i for i, spec in enumerate(specs) if spec.params.logprobs is not None or spec.candidates]
    results = [TokenLogprob(token, 0.0) for token in tokens]
    if asked:
        chosen = logits.index_select(0, torch.tensor([rows[i] for i in asked]))
        counts = [max(specs[i].params.logprobs or 0, specs[i].candidates) for i in asked]
        for i, result in zip(asked, token_logprobs(chosen, [tokens[i] for i in asked], counts), strict=True):
            results[i] = result
    return results


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Log-probabilities of given tokens and of the likeliest ones.

    Args:
        logits: float32 [n, vocab_size].
        tokens: n ids.
        counts: how many of the likeliest to report for each, ties by lower id.

    Raises:
        EngineError: a row holds NaN or has no finite maximum.
    """
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    if not bool(torch.isfinite(normaliser).all()):
        raise EngineError("the model's logits are not finite numbers")
    chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)) - normaliser
    own = chosen.squeeze(1).clamp_(min=LOWEST_LOGPROB).tolist()
    if not any(counts):
        return [TokenLogprob(token, value) for token, value in zip(tokens, own, strict=True)]
    values, ids = _likeliest(logits, max(counts))
    values = np.maximum(values - normaliser.numpy(), np.float32(LOWEST_LOGPROB))
    return [
        TokenLogprob(token, value, tuple(zip(top_ids[:n].tolist(), top_values[:n].tolist(), strict=True)))
        for token, value, n, top_ids, top_values in zip(tokens, own, counts, ids, values, strict=True)
    ]


def _likeliest(logits: torch.Tensor, k: int) -> tuple[npt.NDArray[np.float32], Ids]:
    """The k largest of each row, [n, k], by falling value, equal ones by rising id.

    A row's k-th largest value is at least the k-th largest of its blocks' maxima. So few tokens are left to sort:
    those that reach that bound. This takes a fraction of ``torch.topk``'s time and settles ties as it goes.
    """
    n, vocab = logits.shape
    k, blocks = min(k, vocab), vocab // _BLOCK
    bounds = np.full(n, -np.inf, np.float32)
    if k < blocks:
        maxima = logits[:, : blocks * _BLOCK].view(n, _BLOCK, blocks).amax(dim=1).numpy()
        bounds = np.partition(maxima, blocks - k, axis=1)[:, blocks - k]
    values, ids = np.empty((n, k), np.float32), np.empty((n, k), np.int64)
    for i, row in enumerate(logits.numpy()):
        among = np.flatnonzero(row >= bounds[i])
        ids[i] = among[np.argsort(-row[among], kind="stable")[:k]]
        values[i] = row[ids[i]]
    return values, ids


def _maxima(logits: torch.Tensor) -> tuple[list[float], list[int]]:
    """Each row's maximum, NaN if it holds one, and the lowest id that has it.

    By numpy alone: between two steps that stream through all weights, caches are cold and each library costs its own
    misses.
    """
    values = logits.numpy()
    best = values.argmax(axis=-1)  # NaN counts as the largest
    return values[np.arange(len(values)), best].tolist(), best.tolist()


def _adjusts(spec: SampleSpec) -> bool:
    p = spec.params
    return bool(
        p.logit_bias
        or spec.banned_ids
        or p.repetition_penalty != 1.0
        or p.presence_penalty != 0.0
        or p.frequency_penalty != 0.0
    )


def _adjust(row: torch.Tensor, spec: SampleSpec) -> None:
    """Apply bias, bans and penalties to a row of logits, in place."""
    p, vocab = spec.params, len(row)

    def known(ids: Sequence[int]) -> torch.Tensor:
        array = np.asarray(ids, dtype=np.int64)
        return torch.from_numpy(array[(array >= 0) & (array < vocab)])

    for token, bias in p.logit_bias.items():
        if 0 <= token < vocab:
            row[token] += bias
    if spec.banned_ids:
        row[known(spec.banned_ids)] = -torch.inf
    if p.repetition_penalty != 1.0:
        seen = known([*spec.prompt_ids, *spec.output_ids])
        values = row[seen]  # an id that comes twice is set twice to the same value
        row[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and spec.output_ids:
        ids, counts = torch.unique(known(spec.output_ids), return_counts=True)
        row[ids] -= p.frequency_penalty * counts + p.presence_penalty


def _draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """Draw one token from each row of adjusted logits, float32 [len(specs), vocab_size]; they are changed."""
    temperatures = [1.0 if spec.params.greedy else spec.params.temperature for spec in specs]
    logits /= torch.tensor(temperatures).unsqueeze(1)
    maxima, tokens = _maxima(logits)
    if not all(map(isfinite, maxima)):
        raise EngineError("no token may be drawn: all are banned, or the logits are not finite numbers")

    filtered = [i for i, spec in enumerate(specs) if not spec.params.greedy and _filters(spec.params)]
    if filtered:
        wanted = max(spec.top_k if spec.top_k > 0 else _CANDIDATES for spec in (specs[i].params for i in filtered))
        some = logits if len(filtered) == len(specs) else logits.index_select(0, torch.tensor(filtered))
        normalisers = [0.0] * len(filtered)
        by_mass = [at for at, i in enumerate(filtered) if _needs_normaliser(specs[i].params)]
        if by_mass:
            whole = torch.logsumexp(some.index_select(0, torch.tensor(by_mass)), dim=-1).tolist()
            for at, value in zip(by_mass, whole, strict=True):
                normalisers[at] = value
        values, ids = _likeliest(some, wanted)
        for at, i in enumerate(filtered):
            tokens[i] = _draw_filtered(some[at], values[at], ids[at], normalisers[at], specs[i])
    for i, spec in enumerate(specs):
        if not spec.params.greedy and not _filters(spec.params):
            tokens[i] = _invert(torch.exp(logits[i] - maxima[i]).numpy(), uniform(spec.seed, len(spec.output_ids)))
    return tokens


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _needs_normaliser(params: SamplingParams) -> bool:
    """Whether top_p is a share of all tokens' mass, not just of what the other filters keep."""
    return params.top_p < 1.0 and params.top_k <= 0 and params.min_p <= 0.0


def _draw_filtered(
    row: torch.Tensor, values: npt.NDArray[np.float32], ids: Ids, normaliser: float, spec: SampleSpec
) -> int:
    """Draw under min_p, top_k and top_p, given the row's likeliest tokens; look at more where those don't do."""
    candidates = values.astype(np.float64)
    while (kept := _kept(candidates, len(ids) == len(row), normaliser, spec.params)) is None:
        more, (ids,) = _likeliest(row.unsqueeze(0), 8 * len(ids))
        candidates = more[0].astype(np.float64)
    weights = np.exp(candidates[:kept] - candidates[0])
    return int(ids[_invert(weights, uniform(spec.seed, len(spec.output_ids)))])


def _kept(values: Floats, complete: bool, normaliser: float, params: SamplingParams) -> int | None:
    """How many of the likeliest tokens min_p, then top_k, then top_p keep (at least one).

    Args:
        values: scaled logits, falling.
        complete: whether these are all there are.
        normaliser: log-sum-exp of all there are, where ``_needs_normaliser``.
        params: the filters.

    Returns:
        The count, or None if it depends on tokens that are not in ``values``.
    """
    kept, certain = len(values), complete
    if params.min_p > 0.0:
        likely = int(np.searchsorted(-values, -(values[0] + log(params.min_p)), side="right"))
        certain = certain or likely < kept
        kept = min(kept, likely)
    if 0 < params.top_k <= kept:
        kept, certain = params.top_k, True
    if params.top_p < 1.0:
        if not certain and not _needs_normaliser(params):
            return None
        cumulated = np.cumsum(np.exp(values[:kept] - (values[0] if certain else normaliser)))
        mass = params.top_p * (cumulated[-1] if certain else 1.0)
        reached = int(np.searchsorted(cumulated, mass, side="left")) + 1
        certain = certain or reached <= kept
        kept = min(kept, reached)
    return max(kept, 1) if certain else None


def _invert(weights: npt.NDArray[np.floating], u: float) -> int:
    """The index at which the cumulated weights first exceed the share u of their sum; never one of weight 0."""
    cumulated = np.cumsum(weights, dtype=np.float64)
    target = min(u * cumulated[-1], np.nextafter(cumulated[-1], 0.0))
    return int(np.searchsorted(cumulated, target, side="right"))
