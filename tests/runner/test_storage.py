"""Page storage: the layout, the writes, the copies, the limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagetrie.errors import ConfigError
from pagetrie.models.config import ModelConfig, RopeConfig
from pagetrie.runner.storage import PageStorage, available_memory, bytes_per_page

CONFIG = ModelConfig("llama", "tiny", 64, 16, 32, 3, 4, 2, 4, 1e-5, 128, RopeConfig())


def filled(dtype: str = "fp16") -> PageStorage:
    storage = PageStorage(6, 4, CONFIG, dtype)  # type: ignore[arg-type]
    storage.data.copy_(torch.arange(storage.data.numel()).view(storage.data.shape) % 1000)
    return storage


@pytest.mark.parametrize(("dtype", "size"), [("fp16", 2), ("fp32", 4)])
def test_a_page_is_one_run_of_bytes(dtype: str, size: int) -> None:
    storage = filled(dtype)
    expected = 3 * 2 * 2 * 4 * 4 * size
    assert storage.bytes_per_page == expected == bytes_per_page(CONFIG, 4, dtype)  # type: ignore[arg-type]
    view = storage.read_page(2)
    assert view.dtype == np.uint8
    assert view.shape == (expected,)
    assert view.ctypes.data == storage.data.data_ptr() + 2 * expected
    before = storage.data.clone()
    storage.write_page(5, view)
    assert torch.equal(storage.data[5], before[2])
    assert torch.equal(storage.data[:5], before[:5])


def test_write_touches_only_its_slots_and_read_gives_them_back() -> None:
    storage = filled()
    before = storage.data.clone()
    pages, slots = torch.tensor([5, 0, 5]), torch.tensor([3, 0, 1])
    kv = torch.randn(3, 2, 2, 4).half().float()
    storage.write(1, pages, slots, kv)
    for token, (page, slot) in enumerate(zip(pages, slots, strict=True)):
        assert torch.equal(storage.keys[page, 1, :, :, slot].float(), kv[token, 0])
        assert torch.equal(storage.values[page, 1, :, slot].float(), kv[token, 1])
        block = before[page, 1].view(2, 2, -1)
        block[0].view(2, 4, 4)[:, :, slot] = kv[token, 0].half()
        block[1].view(2, 4, 4)[:, slot] = kv[token, 1].half()
    assert torch.equal(storage.data, before)
    index = storage.block_index(torch.tensor([0, 5, 0]))
    out = storage.read(1, index, storage.block_buffer(3))
    assert torch.equal(out, before[[0, 5, 0], 1])
    keys, values = storage.block_views(out)
    assert torch.equal(keys[1], storage.keys[5, 1].transpose(-1, -2))
    assert torch.equal(values[1], storage.values[5, 1])


def test_values_beyond_fp16_are_stored_as_its_largest() -> None:
    storage = filled()
    kv = torch.full((1, 2, 2, 4), 1e6)
    kv[:, 1] = -1e6
    storage.write(0, torch.tensor([1]), torch.tensor([2]), kv)
    assert storage.keys[1, 0, :, :, 2].unique().tolist() == [65504.0]
    assert storage.values[1, 0, :, 2].unique().tolist() == [-65504.0]


def test_copies_run_in_order() -> None:
    storage = filled()
    before = storage.data.clone()
    storage.copy_pages([(0, 1), (1, 2), (3, 0)])
    assert torch.equal(storage.data, before[[3, 0, 0, 3, 4, 5]])


def test_more_than_the_machine_has_is_refused_before_it_is_taken() -> None:
    available = available_memory()
    assert available is not None
    pages = 2 * available // bytes_per_page(CONFIG, 16)
    with pytest.raises(ConfigError, match=rf"{pages} pages of 1536 bytes need .* GiB, but only .* GiB"):
        PageStorage(pages, 16, CONFIG)


@pytest.mark.parametrize(("pages", "size"), [(0, 16), (4, 0), (-1, 16)])
def test_empty_storage_is_refused(pages: int, size: int) -> None:
    with pytest.raises(ConfigError, match="at least one page"):
        PageStorage(pages, size, CONFIG)
