"""Gradient-boosted oblivious trees for one probability: small, fast to fit and refit, no dependency but numpy.

An oblivious tree (Kohavi & Li 1995; used by CatBoost, Prokhorenkova et al. 2018) asks the same question on all nodes
of a level, so a prediction is a few comparisons that make the index of a leaf. Fitted by Newton steps on the
logistic loss over binned features (Friedman 2001; Chen & Guestrin 2016).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class BoostedTrees:
    """A fitted model.

    Args:
        base: log-odds without any tree.
        trees: per tree the (feature, threshold) of each level, and the leaf values, of which there are 2**levels. A
            value above the threshold sets the level's bit, the first level's being the highest.
    """

    def __init__(self, base: float, trees: Sequence[tuple[Sequence[tuple[int, float]], Sequence[float]]]) -> None:
        self._base = base
        self._trees = trees

    def log_odds(self, features: Sequence[float]) -> float:
        """Log-odds for one row of features."""
        total = self._base
        for splits, values in self._trees:
            leaf = 0
            for feature, threshold in splits:
                leaf += leaf + (features[feature] >= threshold)
            total += values[leaf]
        return total

    def log_odds_of(self, features: Floats) -> Floats:
        """Log-odds for rows of features [n, f]."""
        total = np.full(len(features), self._base)
        for splits, values in self._trees:
            leaf = np.zeros(len(features), np.int64)
            for feature, threshold in splits:
                leaf = leaf * 2 + (features[:, feature] >= threshold)
            total += np.asarray(values)[leaf]
        return total

    def probability(self, features: Sequence[float]) -> float:
        return 1 / (1 + math.exp(-self.log_odds(features)))


def fit(
    features: Floats,
    labels: Floats,
    weights: Floats,
    *,
    trees: int = 20,
    levels: int = 3,
    rate: float = 0.3,
    bins: int = 16,
    damping: float = 5.0,
) -> BoostedTrees:
    """Fit to ``features`` [n, f], ``labels`` [n] in [0, 1] and ``weights`` [n] > 0.

    Args:
        trees, levels: size of the model.
        rate: share of a Newton step to take.
        bins: quantile bins per feature.
        damping: L2 penalty on leaf values.
    """
    rows, columns = features.shape
    edges = [np.unique(np.quantile(column, np.linspace(0, 1, bins + 1)[1:-1])) for column in features.T]
    binned = np.stack([np.searchsorted(e, c, side="right") for e, c in zip(edges, features.T, strict=True)], axis=1)
    cells = binned + np.arange(columns) * bins
    prior = np.clip(np.average(labels, weights=weights), 0.01, 0.99)
    base = float(np.log(prior / (1 - prior)))
    odds = np.full(rows, base)
    made = []
    for _ in range(trees):
        chance = 1 / (1 + np.exp(-odds))
        gradient, curvature = (labels - chance) * weights, chance * (1 - chance) * weights
        wide_gradient, wide_curvature = np.repeat(gradient, columns), np.repeat(curvature, columns)
        leaf = np.zeros(rows, np.int64)
        splits: list[tuple[int, float]] = []
        for level in range(levels):
            shape = (1 << level, columns, bins)
            index = (leaf[:, None] * (columns * bins) + cells).ravel()
            size = shape[0] * columns * bins
            below_g = np.bincount(index, wide_gradient, size).reshape(shape).cumsum(2)
            below_h = np.bincount(index, wide_curvature, size).reshape(shape).cumsum(2)
            above_g, above_h = below_g[:, :, -1:] - below_g, below_h[:, :, -1:] - below_h
            gain = (below_g**2 / (below_h + damping) + above_g**2 / (above_h + damping)).sum(0)
            for column, e in enumerate(edges):
                gain[column, len(e) :] = -1.0
            column, cut = divmod(int(gain.argmax()), bins)
            if gain[column, cut] < 0:
                break
            splits.append((column, float(edges[column][cut])))
            leaf = leaf * 2 + (binned[:, column] > cut)
        size = 1 << len(splits)
        values = rate * np.bincount(leaf, gradient, size) / (np.bincount(leaf, curvature, size) + damping)
        odds += values[leaf]
        made.append((splits, values.tolist()))
    return BoostedTrees(base, made)
