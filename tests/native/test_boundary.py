"""What the extension refuses, and that it brings no second pool of threads."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from pagetrie import _native
from pagetrie.errors import ConfigError
from pagetrie.runner.attention import AttentionPlan
from pagetrie.runner.native_attention import attention_planner
from pagetrie.runner.storage import PageStorage
from tests.native.helpers import make_config


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def plan(**changes: object) -> _native.AttentionPlan:
    arguments = {
        "page_size": 4,
        "starts": ints(3, 0),
        "counts": ints(1, 5),
        "tables": ints(0, 1, 2),
        "table_offsets": ints(0, 1, 3),
        "n_heads": 4,
        "n_kv_heads": 2,
    }
    return _native.AttentionPlan(**(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"starts": np.array([3, 0])}, r"starts must be a contiguous vector of int32, got int64 \[2\]"),
        ({"starts": ints(3, 0, 9, 9)[::2]}, "starts must be a contiguous vector"),
        ({"counts": ints(1)}, "n, n and n [+] 1 elements, got 2, 1 and 3"),
        ({"counts": ints(1, 0)}, "sequence 1 must have start >= 0 and count >= 1, got 0 and 0"),
        ({"starts": ints(-1, 0)}, "got -1 and 1"),
        ({"counts": ints(1, 9)}, "sequence 1 needs 3 pages, its table has 2"),
        ({"tables": ints(0, 1, -7)}, "sequence 1 has page -7 in its table"),
        ({"tables": ints(0, 1)}, "table_offsets must end with the length of tables, 2, got 3"),
        ({"table_offsets": ints(0, 9, 3)}, "table_offsets must not fall, got 9"),
        ({"table_offsets": ints(1, 1, 3)}, "table_offsets must begin with 0, got 1"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"n_heads": 5}, "n_heads must be a multiple of n_kv_heads, got 5 and 2"),
        ({"window": -1}, "window must be at least 0, got -1"),
    ],
)
def test_bad_plans_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**changes)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(3, 2, 2, 2, 64, dtype=torch.float64), r"got float64 \[3, 2, 2, 2, 64\]"),
        (torch.zeros(3, 2, 2, 2, 64, dtype=torch.bfloat16), "data must be a contiguous float16 or float32"),
        (torch.zeros(3, 2, 2, 2, 66), "data must be"),
        (torch.zeros(3, 2, 1, 2, 64), "data must be"),
        (torch.zeros(3, 2, 2, 2, 128)[..., ::2], "data must be"),
        (torch.zeros(3, 2, 2, 2, 12), "head_dim must be even and at most 256, got 3"),
        (torch.zeros(1, 1, 2, 1, 4 * 258), "head_dim must be even and at most 256, got 258"),
    ],
)
def test_bad_pages_are_refused(data: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.KvPages(data, 4)


def test_calls_that_do_not_fit_are_refused() -> None:
    pages = _native.KvPages(torch.zeros(3, 2, 2, 2, 64), 4)
    q, out = torch.zeros(6, 4, 16), torch.zeros(6, 4, 16)
    _native.attend(plan(), pages, 1, q, out, 1.0)
    with pytest.raises(ValueError, match="layer must be between 0 and 1, got 2"):
        _native.attend(plan(), pages, 2, q, out, 1.0)
    with pytest.raises(ValueError, match=r"q must be float32 \[6, 4, 16\].*, got float32 \[5, 4, 16\]"):
        _native.attend(plan(), pages, 0, q[:5], out, 1.0)
    with pytest.raises(ValueError, match="q must be float32"):
        _native.attend(plan(), pages, 0, q.double(), out, 1.0)
    with pytest.raises(ValueError, match="out must be float32"):
        _native.attend(plan(), pages, 0, q, torch.zeros(6, 4, 32)[..., ::2], 1.0)
    with pytest.raises(ValueError, match="there are 3 pages, the plan uses page 3"):
        _native.attend(plan(tables=ints(0, 1, 3)), pages, 0, q, out, 1.0)
    with pytest.raises(ValueError, match="pages of 8 tokens and 2 kv heads, got 4 and 2"):
        _native.attend(plan(page_size=8), pages, 0, q, out, 1.0)
    with pytest.raises(ValueError, match=r"kv must be float32 \[6, 4, 16\]"):
        _native.store(plan(), pages, 0, torch.zeros(6, 8, 16))
    with pytest.raises(ValueError, match=r"rotations must be float32 \[6, 8, 2\]"):
        _native.rotate_and_store(plan(), pages, 0, torch.zeros(6, 8, 16), torch.zeros(6, 16))


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="isa must be portable, avx2, avx512 or auto, got sse9"):
        _native.set_isa("sse9")
    with pytest.raises(ValueError, match="threads must be at least 0, got -1"):
        _native.set_threads(-1)


def test_which_attention_a_model_gets() -> None:
    fits, odd = make_config(2, 1, 64), make_config(2, 1, 7)
    native = attention_planner(PageStorage(2, 4, fits), fits, "auto")
    assert native.func is not AttentionPlan  # type: ignore[attr-defined]
    for config, kind in ((fits, "torch"), (odd, "auto")):
        planner = attention_planner(PageStorage(2, 4, config), config, kind)  # type: ignore[arg-type]
        assert planner.func is AttentionPlan  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="heads of an even size up to 256, this model has 7"):
        attention_planner(PageStorage(2, 4, odd), odd, "native")


def test_one_pool_of_threads_serves_torch_and_the_kernels() -> None:
    program = """
from pathlib import Path
import numpy as np
from pagetrie.runner import native_attention
import torch
from pagetrie import _native

def runtimes():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if any(name in line for name in ("libgomp", "libomp", "libiomp"))}

def workers():
    return len(list(Path("/proc/self/task").iterdir()))

native_attention.set_threads(3)
torch.mm(torch.randn(700, 700), torch.randn(700, 700))
torch.randn(1 << 20).exp()
before = workers()
pages = _native.KvPages(torch.zeros(600, 1, 2, 2, 64 * 16), 16)
plan = _native.AttentionPlan(16, np.array([5000], np.int32), np.array([200], np.int32), np.arange(400, dtype=np.int32),
                             np.array([0, 400], np.int32), 8, 2)
q = torch.randn(200, 8, 64)
_native.attend(plan, pages, 0, q, torch.empty_like(q), 0.125)
assert _native.threads() == 3
print(len(runtimes()), workers() - before)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.split() == ["1", "0"], result.stdout + result.stderr
