"""Where the keys and values live: one block of memory, cut into pages."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from pagetrie.errors import ConfigError
from pagetrie.models.config import ModelConfig

LAYOUT_VERSION = 1
"""Changes with the meaning of a page's bytes: pages stored before are not read any more."""

KvDtype: TypeAlias = Literal["fp16", "fp32"]
_TORCH_DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


def bytes_per_page(config: ModelConfig, page_size: int, dtype: KvDtype = "fp16") -> int:
    """Bytes of one page: ``page_size`` tokens' keys and values over all layers."""
    return config.kv_bytes_per_token(_TORCH_DTYPES[dtype].itemsize) * page_size


class PageStorage:
    """Keys and values in pages of ``page_size`` tokens.

    The layout is page-major, ``[num_pages, n_layers, 2, n_kv_heads, head_dim * page_size]``: all that a page holds is
    one run of bytes, which moves by one copy. A head's keys lie as ``[head_dim, page_size]``, so that a product with
    16 of them at a time reads its operand in order, its values as ``[page_size, head_dim]``. Memory is only reserved
    here; the system hands it out as pages are first written. A slot that was never written holds anything, NaN
    included: readers must leave such slots out.

    Attributes:
        data: the whole, in the layout above.
        keys, values: views of it, [num_pages, n_layers, n_kv_heads, head_dim, page_size] and
            [num_pages, n_layers, n_kv_heads, page_size, head_dim].
        bytes_per_page: length of the run of bytes of a page.

    Raises:
        ConfigError: the sizes make no sense, or the machine hasn't that much memory.
    """

    def __init__(self, num_pages: int, page_size: int, config: ModelConfig, dtype: KvDtype = "fp16") -> None:
        if num_pages < 1 or page_size < 1:
            raise ConfigError(f"the KV cache needs at least one page of one token, got {num_pages} of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.bytes_per_page = bytes_per_page(config, page_size, dtype)
        available = available_memory()
        if available is not None and self.bytes_per_page * num_pages > available:
            raise ConfigError(
                f"{num_pages} pages of {self.bytes_per_page} bytes need {_gib(self.bytes_per_page * num_pages)} GiB, "
                f"but only {_gib(available)} GiB of memory are available; ask for fewer pages"
            )
        size, head_dim = page_size, config.head_dim
        shape = (num_pages, config.n_layers, 2, config.n_kv_heads, size * head_dim)
        self.data = _reserve(self.bytes_per_page * num_pages).view(_TORCH_DTYPES[dtype]).view(shape)
        self.keys = self.data[:, :, 0].view(*shape[:2], -1, head_dim, size)
        self.values = self.data[:, :, 1].view(*shape[:2], -1, size, head_dim)
        self._bytes = self.data.view(num_pages, -1).view(torch.uint8).numpy()
        self._blocks = self.data.view(num_pages * config.n_layers, *shape[2:])
        self._n_layers = config.n_layers
        self._sizes = (size, head_dim)

    def write(self, layer: int, pages: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Store tokens' keys and values in one layer.

        Args:
            layer: the layer.
            pages: int64 [tokens], the physical page of each token.
            slots: int64 [tokens], its slot in that page; no two tokens share one.
            kv: float32 [tokens, 2, n_kv_heads, head_dim]. Values beyond fp16's range are stored as the largest it has.
        """
        if self.data.dtype == torch.float16:
            limit = torch.finfo(torch.float16).max
            kv = kv.clamp(-limit, limit)
        kv = kv.to(self.data.dtype)
        self.keys[pages, layer, :, :, slots] = kv[:, 0]
        self.values[pages, layer, :, slots] = kv[:, 1]

    def block_index(self, pages: torch.Tensor) -> torch.Tensor:
        """Where the pages' parts of layer 0 are, for ``read``; int64, of the shape of ``pages``."""
        return pages * self._n_layers

    def read(self, layer: int, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Copy one layer's part of some pages.

        Args:
            layer: the layer.
            index: int64 [n], from ``block_index``.
            out: from ``block_buffer``; returned.
        """
        return torch.index_select(self._blocks, 0, index + layer, out=out)

    def block_buffer(self, n: int) -> torch.Tensor:
        """An uninitialised buffer for ``read`` of n pages, [n, 2, n_kv_heads, head_dim * page_size]."""
        return torch.empty(n, *self._blocks.shape[1:], dtype=self.data.dtype)

    def block_views(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and the values in a ``block_buffer``, both as views [n, n_kv_heads, page_size, head_dim]."""
        size, head_dim = self._sizes
        heads = blocks.shape[:1] + blocks.shape[2:3]
        keys = blocks[:, 0].view(*heads, head_dim, size).transpose(-1, -2)
        return keys, blocks[:, 1].view(*heads, size, head_dim)

    def copy_pages(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy whole pages, (source, destination), strictly in order: a later pair sees what an earlier one wrote."""
        for source, destination in copies:
            self.data[destination].copy_(self.data[source])

    def read_page(self, page: int) -> NDArray[np.uint8]:
        """The bytes of a page, uint8 [bytes_per_page]; a view, so writing to it writes the page."""
        view: NDArray[np.uint8] = self._bytes[page]
        return view

    def write_page(self, page: int, data: NDArray[np.uint8]) -> None:
        """Copy a page in, uint8 [bytes_per_page]. Other threads may use other pages meanwhile."""
        np.copyto(self._bytes[page], data)


def _reserve(size: int) -> torch.Tensor:
    """Memory that the system hands out as it is written, in huge pages where it has them; uint8 [size].

    A layer's attention touches a few KB of every page, so that small pages would cost a page walk or more for each.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def available_memory() -> int | None:
    """Bytes that this process could still get: the machine's, or what its control group leaves; None if unknown."""
    limits = []
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            used = int((group / "memory.current").read_text(encoding="ascii"))
            limits.append(max(0, int(limit) - used))
    except OSError:
        pass  # no control group of version 2, so no limit from one
    return min(limits, default=None)


def _gib(n: int) -> str:
    return f"{n / 2**30:.2f}"
