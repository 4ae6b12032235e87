"""Native attention over pages: right, independent of the batch, blind to what it may not see."""

from __future__ import annotations

import math
import random

import pytest
import torch

from pagetrie import _native
from pagetrie.runner.attention import AttentionPlan
from pagetrie.runner.native_attention import NativeAttention
from tests.budget import first
from tests.native.helpers import Step, available_isas, isa, make_config, random_step, threads

ISAS = available_isas()
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-3}


def worst(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, relative to the largest value of its row."""
    scale = expected.abs().amax(-1, keepdim=True)
    return float(((got.double() - expected).abs() / scale).max())


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("seed", first(10, range(40)))
def test_random_steps_agree_with_float64(seed: int, dtype: str) -> None:
    step = random_step(seed, dtype)  # type: ignore[arg-type]
    expected = step.exact()
    for name in ISAS:
        with isa(name):
            # What is stored is the same for both, so even fp16 pages leave only the rounding of fp32.
            assert worst(step.native(), expected) < 2e-5, name


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("seed", first(6, range(12)))
def test_stores_and_attends_as_the_torch_reference(seed: int, dtype: str) -> None:
    step = random_step(1000 + seed, dtype)  # type: ignore[arg-type]
    config = step.config
    kv = torch.randn(step.tokens, 2, config.n_kv_heads, config.head_dim)
    before = step.storage.data.clone()
    expected = AttentionPlan(step.shares(), step.storage, config)(1, step.q.clone(), kv)
    stored = step.storage.data.clone()
    step.storage.data.copy_(before)
    got = NativeAttention(step.shares(), step.pages, step.page_size, config)(1, step.q, kv)
    assert torch.equal(step.storage.data.view(torch.uint8), stored.view(torch.uint8))
    assert got.shape == expected.shape
    shape = (step.tokens, config.n_heads, config.head_dim)
    assert worst(got.view(shape), expected.view(shape).double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("seed", first(8, range(25)))
def test_a_sequence_gets_the_same_bits_alone_and_in_any_batch(seed: int, name: str) -> None:
    step = random_step(2000 + seed, "fp16")
    rng = random.Random(seed)
    with isa(name):
        whole = step.native()
        for index in range(len(step.sequences)):
            assert torch.equal(step.native(chosen=[index]), whole[step.rows(index)])
        order = rng.sample(range(len(step.sequences)), len(step.sequences))
        mixed = torch.cat([whole[step.rows(i)] for i in order])
        assert torch.equal(step.native(chosen=order), mixed)


@pytest.mark.parametrize("seed", range(15))
def test_the_number_of_threads_changes_no_bit(seed: int) -> None:
    step = random_step(3000 + seed, "fp16")
    results = []
    for n in (1, 2, 5):
        with threads(n):
            results.append(step.native())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("window", [None, 50])
def test_how_a_prompt_is_cut_into_chunks_changes_no_bit(window: int | None) -> None:
    step = Step(make_config(9, 3, 64, window), 16, "fp16")
    sequence = step.add(0, 600)
    step.finish()
    whole = step.native()
    # A chunk is planned and masked differently by its size: one token, a few, more than a row group.
    for start, count in ((0, 600), (0, 1), (511, 3), (590, 1), (100, 40), (250, 350)):
        sequence.start, sequence.count = start, count
        out = torch.full((count, 9, 64), torch.nan)
        _native.attend(step.plan(), step.pages, 1, step.q[start : start + count].clone(), out, 1 / 8)
        assert torch.equal(out, whole[start : start + count])


@pytest.mark.parametrize("name", [name for name in ISAS if name != "portable"])
@pytest.mark.parametrize("seed", range(15))
def test_instruction_sets_agree(seed: int, name: str) -> None:
    step = random_step(4000 + seed, "fp16")
    with isa("portable"):
        portable = step.native()
    with isa(name):
        assert worst(step.native(), portable.double()) < 1e-5


@pytest.mark.skipif("avx512" not in ISAS, reason="neither AVX-512 nor its emulation (make test-avx512)")
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("seed", range(15))
def test_avx512_gives_the_bits_of_avx2(seed: int, dtype: str) -> None:
    step = random_step(4000 + seed, dtype)  # type: ignore[arg-type]
    results = []
    for name in ("avx2", "avx512"):
        with isa(name):
            results.append(step.native())
    assert torch.equal(*results)


def test_a_window_hides_what_lies_before_it() -> None:
    config = make_config(4, 2, 64, window=10)
    step = Step(config, 16, "fp32")
    step.add(40, 30)
    step.add(69, 1, step.sequences[0], 32)
    step.finish()
    before = step.native()
    # Positions 0 .. 30 are out of reach of all; 60 and later are in reach of the last tokens.
    table = step.sequences[0].pages
    step.storage.keys[table[:1], 1] = torch.nan
    step.storage.values[table[:1], 1] = torch.nan
    assert torch.equal(step.native(), before)
    step.storage.values[table[4], 1, :, 1] += 1.0
    assert not torch.equal(step.native(), before)


def test_garbage_in_unused_slots_never_shows() -> None:
    step = random_step(77, "fp32")
    before = step.native()
    unused = step.storage.values.isnan()
    assert unused.any()
    for garbage in (torch.inf, -torch.inf, 1e30):
        step.storage.values.masked_fill_(unused, garbage)
        step.storage.keys.masked_fill_(unused.transpose(-1, -2), garbage)
        assert torch.equal(step.native(), before)


def test_not_a_number_in_what_is_seen_does_show() -> None:
    step = Step(make_config(4, 2, 64), 16, "fp16")
    step.add(40, 1)
    step.finish()
    step.storage.keys[step.sequences[0].pages[1], 1, :, 5, 3] = torch.nan
    assert step.native().isnan().all()


@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0])
def test_flat_and_steep_scores(scale: float) -> None:
    step = Step(make_config(4, 1, 64), 16, "fp32")
    step.add(900, 70)
    step.add(1100, 1)
    step.finish()
    step.q *= scale
    assert worst(step.native(), step.exact()) < 1e-4


def test_growing_scores_renew_the_reference_at_every_tile() -> None:
    step = Step(make_config(1, 1, 16), 16, "fp32")
    step.add(799, 1)
    step.finish()
    table = torch.tensor(step.sequences[0].pages)
    step.q.fill_(1.0)
    for tile in range(50):
        step.storage.keys[table[tile], 1] = 2.5 * tile
    assert worst(step.native(), step.exact()) < 1e-4


def test_bytes_read_follow_what_is_held_once() -> None:
    # 50 users share 2,000 tokens and have gone 32 tokens their own way.
    step = Step(make_config(9, 3, 64), 16, "fp16")
    first = step.add(2031, 1)
    for _ in range(49):
        step.add(2031, 1, first, 2000)
    step.finish()
    step.pages.counting = True
    step.native()
    per_token = 2 * 3 * 64 * 2
    unique = (2000 + 50 * 32) * per_token
    assert unique <= step.pages.bytes_read <= 1.1 * unique
    step.pages.bytes_read = 0
    step.native(chosen=[0])
    assert step.pages.bytes_read == 2032 * per_token


def test_sharing_at_several_depths_is_read_once() -> None:
    # 2 tenants of 512 tokens, 2 documents of 256 each under them, 3 questions of 64 tokens under each.
    step = Step(make_config(3, 1, 64), 16, "fp16")
    for _ in range(2):
        trunk = None
        for _ in range(2):
            document = None
            for _ in range(3):
                parent, shared = (document, 768) if document else (trunk, 512) if trunk else (None, 0)
                question = step.add(831, 1, parent, shared)
                document, trunk = document or question, trunk or question
    step.finish()
    step.pages.counting = True
    got = step.native()
    assert step.pages.bytes_read == (2 * 512 + 4 * 256 + 12 * 64) * 2 * 64 * 2
    assert worst(got, step.exact()) < 1e-5


def test_counting_is_off_unless_asked_for() -> None:
    step = random_step(5, "fp16")
    step.native()
    assert step.pages.bytes_read == 0


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80])
@pytest.mark.parametrize("page_size", [1, 5, 16, 128])
def test_rotation_and_writing(page_size: int, head_dim: int, name: str) -> None:
    config = make_config(6, 2, head_dim)
    step = Step(config, page_size, "fp16")
    step.add(3, 1)
    step.add(17, 150)
    step.finish()
    step.storage.data.fill_(7.0)
    qkv = torch.randn(step.tokens, 10, head_dim)
    angles = torch.randn(step.tokens, head_dim // 2)
    rotations = torch.polar(torch.ones_like(angles), angles)
    rotated = torch.view_as_real(torch.view_as_complex(qkv.unflatten(-1, (-1, 2))) * rotations.unsqueeze(1)).flatten(-2)
    with isa(name):
        _native.rotate_and_store(step.plan(), step.pages, 1, qkv, torch.view_as_real(rotations))
    torch.testing.assert_close(qkv[:, :8], rotated[:, :8])
    by_rotation = step.storage.data.clone()
    step.storage.data.fill_(7.0)
    with isa(name):
        _native.store(step.plan(), step.pages, 1, qkv[:, 6:])
    assert torch.equal(step.storage.data, by_rotation)
    step.storage.data.fill_(7.0)
    for index, sequence in enumerate(step.sequences):
        at = torch.arange(sequence.start, sequence.start + sequence.count)
        pages = torch.tensor(sequence.pages)[at // page_size]
        step.storage.write(1, pages, at % page_size, qkv[step.rows(index), 6:].view(-1, 2, 2, head_dim))
    assert torch.equal(step.storage.data, by_rotation)


@pytest.mark.parametrize("name", ISAS)
def test_fp16_rounds_as_torch_does(name: str) -> None:
    config = make_config(1, 1, 256)
    step = Step(config, 16, "fp16")
    step.add(0, 256)
    step.finish()
    # All exponents, both signs, ties included; beyond the range the largest value, NaN stays.
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32).repeat(2) << 16
    low = torch.randint(0, 2**16, high.shape, generator=torch.Generator().manual_seed(0)).int()
    low[::3] = 0x1000
    kv = (high | low).view(torch.float32).view(256, 2, 256)
    with isa(name):
        _native.store(step.plan(), step.pages, 0, kv)
    got = step.storage.data.clone()
    at = torch.arange(256)
    step.storage.write(0, torch.tensor(step.sequences[0].pages)[at // 16], at % 16, kv.unsqueeze(2))
    assert torch.equal(got[:, 0].isnan(), step.storage.data[:, 0].isnan())
    assert torch.equal(got[:, 0].nan_to_num(1.5), step.storage.data[:, 0].nan_to_num(1.5))


def test_tokens_may_lie_apart() -> None:
    step = random_step(9, "fp32")
    config = step.config
    expected = step.native()
    wide = torch.randn(step.tokens, config.n_heads + 3, config.head_dim)
    wide[:, 2:-1] = step.q
    out = torch.zeros(step.tokens, config.n_heads + 1, config.head_dim)
    _native.attend(step.plan(), step.pages, 1, wide[:, 2:-1], out[:, 1:], 1 / math.sqrt(config.head_dim))
    assert torch.equal(out[:, 1:], expected)
    assert not out[:, 0].any()
