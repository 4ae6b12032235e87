"""Attention over pages, in plain torch.

What a step needs (which pages, which masks, which sequences share) is worked out once, in ``AttentionPlan``; each
layer then only gathers and multiplies. Keys and values are always read back from the pages, so a cached prefix and a
fresh one give the same numbers.

- **Prefill chunks** run one sequence at a time: its pages are gathered once per layer, exactly those in reach.
- **Decode tokens** run together, in the parts that ``page_sharing`` finds: a run of pages that several hold is
  gathered once and multiplied with all their queries. A token's partial results merge from the trie's root to its
  leaf, by log-sum-exp.

A slot beyond a sequence's end holds anything, NaN included; it is sliced off or overwritten with zeros in the gathered
copy, since a mask alone would not keep a NaN out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
import torch.nn.functional as F

from pagetrie.models.config import ModelConfig
from pagetrie.runner.page_sharing import DecodePart, Ints, group_decodes
from pagetrie.runner.storage import PageStorage

_PART_BYTES = 32 << 20
"""Most bytes of fp32 keys and values that a decode part of several sequences gathers: what a last-level cache holds."""


@dataclass(slots=True, frozen=True)
class Share:
    """One sequence's part of a step: rows ``row .. row + n - 1`` are its tokens at positions ``start ..``."""

    row: int
    n: int
    start: int
    pages: Sequence[int]


class AttentionPlan:
    """Attention of one step, for ``Decoder.forward``.

    Args:
        shares: the sequences' parts, in the order of rows and without gaps.
        storage: the pages. Each share's have room for all its tokens; no two tokens share a slot.
        config: the model's sizes and window.
    """

    def __init__(self, shares: Sequence[Share], storage: PageStorage, config: ModelConfig) -> None:
        self._storage = storage
        self._groups = (config.n_kv_heads, config.n_heads // config.n_kv_heads, config.head_dim)
        self._scale = 1 / sqrt(config.head_dim)
        size, window = storage.page_size, config.sliding_window

        slots = [(np.asarray(s.pages, np.int64), np.arange(s.start, s.start + s.n)) for s in shares]
        pages = torch.from_numpy(np.concatenate([table[at // size] for table, at in slots]))
        self._write_to = pages, torch.from_numpy(np.concatenate([at % size for _, at in slots]))

        self._prefills = [_Prefill(share, storage, window) for share in shares if share.n > 1]
        decodes = [share for share in shares if share.n == 1]
        max_tokens = _PART_BYTES // (8 * config.n_kv_heads * config.head_dim)
        parts = group_decodes([s.pages for s in decodes], [s.start for s in decodes], size, window, max_tokens)
        rows = np.array([share.row for share in decodes], np.int64)
        self._decodes = [_Decode(part, rows, storage) for part in parts]
        self._merging = any(part.members.shape[1] > 1 for part in parts)

    def __call__(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Store the new keys and values, then attend; see ``models.decoder.Attend``."""
        self._storage.write(layer, *self._write_to, kv)
        q = q.view(len(q), *self._groups).mul_(self._scale)
        out = torch.empty(q.shape)
        for prefill in self._prefills:
            prefill.run(layer, q, out)
        so_far = torch.full(q.shape[:3], -torch.inf) if self._merging else None
        for part in self._decodes:
            mixed, lse = part.run(layer, q, with_lse=self._merging)
            if so_far is None or lse is None:
                out.index_copy_(0, part.rows, mixed)
            else:
                _merge(part.rows, mixed, lse, out, so_far)
        return out.view(len(out), -1)


class _Gather:
    """Reads the pages of equally long page tables as one fp32 block, layer by layer, into one buffer."""

    def __init__(self, storage: PageStorage, tables: Ints) -> None:
        groups, length = tables.shape
        self._storage = storage
        self._index = storage.block_index(torch.from_numpy(tables.reshape(-1)))
        self._raw = storage.block_buffer(groups * length)
        self._narrow = storage.block_views(self._raw)
        _, heads, page_size, head_dim = self._narrow[1].shape
        wide = torch.empty(2, groups, heads, length, page_size, head_dim)
        self._wide = wide.transpose(2, 3)
        self._tokens = wide.flatten(3, 4)
        self._blank_pages = self._edge_pages = torch.empty(0, dtype=torch.int64)
        self._edge_slots = torch.empty(0, 1, page_size, 1, dtype=torch.bool)

    def blank(self, stale: torch.Tensor) -> None:
        """Have these tokens read as zeros, whatever is stored there; bool [groups, pages * page_size]."""
        by_page = stale.view(len(self._raw), -1)
        edge = by_page.any(1) & ~by_page.all(1)
        self._blank_pages = by_page.all(1).nonzero().squeeze(1)
        self._edge_pages = edge.nonzero().squeeze(1)
        self._edge_slots = by_page[edge].view(-1, 1, by_page.shape[1], 1)

    def __call__(self, layer: int) -> torch.Tensor:
        """Keys and values, float32 [2, groups, n_kv_heads, tokens, head_dim]; valid until the next call."""
        self._storage.read(layer, self._index, self._raw)
        if len(self._blank_pages):
            self._raw.index_fill_(0, self._blank_pages, 0.0)
        for narrow, wide in zip(self._narrow, self._wide, strict=True):
            if len(self._edge_pages):
                edges = narrow.index_select(0, self._edge_pages).masked_fill_(self._edge_slots, 0.0)
                narrow.index_copy_(0, self._edge_pages, edges)
            wide.copy_(narrow.view(wide.shape))
        return self._tokens


class _Prefill:
    """Attention of one sequence's chunk over all it can reach."""

    def __init__(self, share: Share, storage: PageStorage, window: int | None) -> None:
        self._rows = slice(share.row, share.row + share.n)
        size, end = storage.page_size, share.start + share.n
        first_page = 0 if window is None else max(0, share.start - window + 1) // size
        table = np.array([share.pages[first_page : -(-end // size)]], np.int64)
        self._gather = _Gather(storage, table)
        self._tokens = end - first_page * size
        self._mask: torch.Tensor | None = None
        if share.start > 0 or (window is not None and end > window):
            keys = torch.arange(first_page * size, end)
            queries = torch.arange(share.start, end).unsqueeze(1)
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            self._mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """q is [all rows, n_kv_heads, group, head_dim], scaled; this one's rows of ``out``, shaped alike, are set."""
        keys, values = self._gather(layer)[:, 0, :, : self._tokens].unsqueeze(2)
        heads = q[self._rows].permute(1, 2, 0, 3)
        # A key head reaches its group of query heads by a stride of 0: nothing is copied.
        shape = (-1, heads.shape[1], -1, -1)
        mixed = F.scaled_dot_product_attention(
            heads, keys.expand(shape), values.expand(shape), self._mask, is_causal=self._mask is None, scale=1.0
        )
        out[self._rows] = mixed.permute(2, 0, 1, 3)


class _Decode:
    """Attention of a part's tokens over the part's pages.

    Attributes:
        rows: int64 [groups * members], the step's rows that the part's results belong to.
    """

    def __init__(self, part: DecodePart, rows: Ints, storage: PageStorage) -> None:
        self.rows = torch.from_numpy(rows[part.members.reshape(-1)])
        self._shape = part.members.shape
        self._gather = _Gather(storage, part.tables)
        self._tokens = int(part.ends.max())
        at = np.arange(part.tables.shape[1] * storage.page_size)
        stale = torch.from_numpy((at < part.begins[:, None]) | (at >= part.ends[:, None]))
        self._gather.blank(stale)
        self._mask: torch.Tensor | None = None
        if stale[:, : self._tokens].any():
            mask = torch.zeros(stale.shape).masked_fill_(stale, -torch.inf)[:, : self._tokens]
            self._mask = mask.repeat_interleave(storage.data.shape[3], 0).unsqueeze(1)

    def run(self, layer: int, q: torch.Tensor, *, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend over this part alone.

        Args:
            layer: the layer.
            q: float32 [all rows, n_kv_heads, group, head_dim], scaled.
            with_lse: whether the second result is needed.

        Returns:
            The mixed values, [rows, n_kv_heads, group, head_dim], and the log of the softmax's sum,
            [rows, n_kv_heads, group], or None.
        """
        keys, values = self._gather(layer)[:, :, :, : self._tokens].flatten(1, 2)
        heads = q.index_select(0, self.rows).view(*self._shape, *q.shape[1:]).transpose(1, 2)
        stacked = heads.reshape(len(keys), -1, heads.shape[-1])
        if self._mask is None:
            scores = torch.bmm(stacked, keys.transpose(1, 2))
        else:
            scores = torch.baddbmm(self._mask, stacked, keys.transpose(1, 2))
        shares = torch.softmax(scores, dim=-1)
        mixed = torch.bmm(shares, values).view(heads.shape).transpose(1, 2).flatten(0, 1)
        if not with_lse:
            return mixed, None
        # The largest share is at least 1 / tokens, so its logarithm is safe: log(share) = score - lse.
        lse = scores.amax(-1) - shares.amax(-1).log_()
        return mixed, lse.view(heads.shape[:-1]).transpose(1, 2).flatten(0, 1)


def _merge(
    rows: torch.Tensor, mixed: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, out_lse: torch.Tensor
) -> None:
    """Add a part's results to those so far (the softmax identity of FlashAttention, Dao et al. 2022)."""
    before = out_lse[rows]
    total = torch.logaddexp(before, lse)
    old_share, new_share = torch.exp(before - total).unsqueeze(-1), torch.exp(lse - total).unsqueeze(-1)
    # Rows without a result yet hold anything in ``out``; their old share is 0, which would not silence a NaN.
    old = torch.where(old_share > 0, out[rows], 0.0)
    out[rows] = old * old_share + mixed * new_share
    out_lse[rows] = total
