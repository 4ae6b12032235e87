"""Attention over pages by the native kernels (``native/``). ``attention`` is what they are tested against.

A token's result depends on its own sequence alone, to the last bit: not on the rest of the batch, on how the prompt was
cut into chunks, or on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from typing import Literal, TypeAlias

import numpy as np
import torch  # before the extension, so that both use one OpenMP runtime

from pagetrie.errors import ConfigError
from pagetrie.models.config import ModelConfig
from pagetrie.models.decoder import Attend
from pagetrie.runner.attention import AttentionPlan, Share
from pagetrie.runner.storage import PageStorage

try:
    from pagetrie import _native
except ImportError as error:  # sources on the path that were never built
    _missing: ImportError | None = error
else:
    _missing = None

AttentionKind: TypeAlias = Literal["auto", "native", "torch"]
Planner: TypeAlias = Callable[[Sequence[Share]], Attend]

MAX_HEAD_DIM = 256
"""The largest head that the kernels take; sizes must be even."""


def set_threads(threads: int) -> None:
    """Set how many threads torch and the kernels use; both draw on one pool per process."""
    torch.set_num_threads(threads)
    if _missing is None:
        _native.set_threads(threads)


def attention_planner(storage: PageStorage, config: ModelConfig, kind: AttentionKind) -> Planner:
    """What plans the attention of a step.

    Args:
        storage: the pages.
        config: the model's sizes and window.
        kind: the native kernels, the torch reference, or the kernels if they are there and fit the model.

    Raises:
        ConfigError: the native kernels were asked for, but aren't built or don't fit the model.
    """
    if kind == "torch" or (kind == "auto" and _obstacle(config) is not None):
        return partial(AttentionPlan, storage=storage, config=config)
    return native_planner(storage, config)


def native_planner(storage: PageStorage, config: ModelConfig) -> Callable[[Sequence[Share]], NativeAttention]:
    """What plans the attention of a step by the native kernels.

    Raises:
        ConfigError: they aren't built or don't fit the model.
    """
    reason = _obstacle(config)
    if reason is not None:
        raise ConfigError(f"{reason}; use torch attention, with fp16 or fp32 weights")
    pages = _native.KvPages(storage.data, storage.page_size)
    return partial(NativeAttention, pages=pages, page_size=storage.page_size, config=config)


def _obstacle(config: ModelConfig) -> str | None:
    """Why the native kernels can't be used; None if they can."""
    if _missing is not None:
        return f"the native extension is not built ({_missing})"
    if config.head_dim > MAX_HEAD_DIM or config.head_dim % 2:
        return f"native attention takes heads of an even size up to {MAX_HEAD_DIM}, this model has {config.head_dim}"
    return None


class NativeAttention:
    """Attention of one step, for ``Decoder.forward`` and ``QuantizedDecoder.forward``.

    Args:
        shares: the sequences' parts, in the order of rows and without gaps.
        pages: the pages. Each share's have room for all its tokens; no two tokens share a slot.
        page_size: tokens in a page.
        config: the model's sizes and window.
    """

    def __init__(self, shares: Sequence[Share], pages: _native.KvPages, page_size: int, config: ModelConfig) -> None:
        self.pages = pages
        self._scale = 1 / sqrt(config.head_dim)
        tables = [np.asarray(s.pages[: -(-(s.start + s.n) // page_size)], np.int32) for s in shares]
        offsets = np.zeros(len(shares) + 1, np.int32)
        np.cumsum([len(table) for table in tables], out=offsets[1:])
        self.plan = _native.AttentionPlan(
            page_size,
            np.array([share.start for share in shares], np.int32),
            np.array([share.n for share in shares], np.int32),
            np.concatenate(tables),
            offsets,
            config.n_heads,
            config.n_kv_heads,
            config.sliding_window or 0,
        )

    def __call__(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Store the new keys and values, then attend; see ``models.decoder.Attend``."""
        _native.store(self.plan, self.pages, layer, kv.flatten(1, 2))
        out = torch.empty(q.shape)
        _native.attend(self.plan, self.pages, layer, q, out, self._scale)
        return out.view(len(out), -1)
