"""Whole steps: samples and prompt log-probabilities come out for the right sequence and position."""

from __future__ import annotations

import os

import pytest
import torch

from pagetrie.engine.params import SamplingParams
from pagetrie.engine.runner import Runner, SequenceStep, StepPlan
from pagetrie.errors import ConfigError, ModelLoadError
from pagetrie.models.config import RopeConfig
from pagetrie.models.rope import inverse_frequencies
from pagetrie.runner import ModelRunner, model_runner
from pagetrie.runner.threads import physical_cores
from tests.runner.helpers import Driver, greedy, random_tokens, reference_logits, spec, tiny_model


@pytest.fixture(scope="module")
def tiny():
    return tiny_model("llama")


def make_runner(tiny, num_pages: int = 64) -> ModelRunner:
    return ModelRunner(tiny[1], num_pages=num_pages, page_size=16, weights="fp32", kv_dtype="fp32", threads=1)


def test_samples_belong_to_their_sequences(tiny) -> None:
    """Chunks without samples, several samples of one row, and decodes, mixed in one step."""
    runner: Runner = make_runner(tiny)
    prompts = [random_tokens(n, seed=n) for n in (20, 7, 33)]
    pages = [[0, 1], [2], [3, 4, 5]]
    first = runner.execute(
        StepPlan(
            [],
            [
                SequenceStep(prompts[0], 0, pages[0], [spec(greedy(logprobs=2))] * 2),
                SequenceStep(prompts[1], 0, pages[1], [spec(greedy())]),
                SequenceStep(prompts[2][:20], 0, pages[2]),
            ],
        )
    )
    raw = [torch.log_softmax(reference_logits(tiny[0], prompt), -1) for prompt in prompts]
    assert [len(result.samples) for result in first] == [2, 1, 0]
    for sample in first[0].samples:
        assert sample.token_id == int(raw[0][-1].argmax())
        assert sample.logprob == pytest.approx(float(raw[0][-1].max()), abs=1e-3)
        assert [t for t, _ in sample.top] == raw[0][-1].topk(2).indices.tolist()
    token = first[1].samples[0].token_id
    assert token == int(raw[1][-1].argmax())
    second = runner.execute(
        StepPlan(
            [],
            [
                SequenceStep(prompts[2][20:], 20, pages[2], [spec(greedy())]),
                SequenceStep([token], 7, pages[1], [spec(greedy(), output=[token])]),
            ],
        )
    )
    assert second[0].samples[0].token_id == int(raw[2][-1].argmax())
    assert second[1].samples[0].token_id == int(reference_logits(tiny[0], [*prompts[1], token])[-1].argmax())


def test_prompt_logprobs_by_chunks_and_blocks(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "_LOGITS_BYTES", 7 * 4 * 320)  # blocks of 7 rows
    runner = make_runner(tiny)
    prompt = random_tokens(50, seed=5)
    entries = []
    for start, end in ((0, 30), (30, 50)):
        (result,) = runner.execute(
            StepPlan(
                [],
                [
                    SequenceStep(
                        prompt[start:end], start, [9, 2, 7, 1], [], prompt[start + 1 : end + 1], prompt_logprobs=3
                    )
                ],
            )
        )
        assert result.samples == []
        entries += result.prompt_logprobs
    raw = torch.log_softmax(reference_logits(tiny[0], prompt), -1)
    assert [entry.token_id for entry in entries] == prompt[1:]
    for position, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(raw[position, entry.token_id]), abs=1e-3)
        assert [value for _, value in entry.top] == pytest.approx(raw[position].topk(3).values.tolist(), abs=1e-3)


def test_a_plan_of_copies_alone(tiny) -> None:
    runner = make_runner(tiny)
    runner.storage.data.zero_()
    runner.storage.data[3].fill_(2.5)
    assert runner.execute(StepPlan([(3, 5)], [])) == []
    assert torch.equal(runner.storage.data[5], runner.storage.data[3])


def test_a_seeded_choice_goes_on_as_before_after_preemption(tiny) -> None:
    """Twenty draws decoded one by one, and again with a recompute from scratch after the tenth."""
    params = SamplingParams(temperature=1.3, top_p=0.95, repetition_penalty=1.1, seed=11)
    prompt = random_tokens(21, seed=8)

    def generate(preempt_at: int | None) -> list[int]:
        runner = make_runner(tiny)
        output: list[int] = []
        computed = 0
        pages = [4, 11, 2]
        while len(output) < 20:
            if len(output) == preempt_at:
                computed, pages, preempt_at = 0, [20, 9, 31], None
                runner.storage.data.fill_(torch.nan)
            tokens = [*prompt, *output][computed:]
            (result,) = runner.execute(
                StepPlan([], [SequenceStep(tokens, computed, pages, [spec(params, 11, prompt, output)])])
            )
            computed += len(tokens)
            output.append(result.samples[0].token_id)
        return output

    assert generate(None) == generate(10)


def test_weights_beyond_fp16_are_refused(tiny) -> None:
    _, checkpoint = tiny_model("llama")
    checkpoint.tensor("model.layers.1.mlp.up_proj.weight")[3, 4] = 7e4
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.gate_up holds values from .* to 70000, .* 65504"):
        ModelRunner(checkpoint, num_pages=4, page_size=16)
    ModelRunner(checkpoint, num_pages=4, page_size=16, weights="fp32")


def test_too_many_pages_are_refused(tiny) -> None:
    with pytest.raises(ConfigError, match="pages of"):
        make_runner(tiny, num_pages=10**9)


def test_frequency_factors_of_a_gguf_file_divide_the_frequencies() -> None:
    """A file's factors that say what llama3's parameters say give the same angles."""
    llama3 = RopeConfig("llama3", theta=500000.0, factor=8.0, original_max_position=256)
    plain, _ = inverse_frequencies(RopeConfig(theta=500000.0), 16)
    wanted, _ = inverse_frequencies(llama3, 16)
    factors = tuple((plain / wanted).tolist())
    assert len(set(factors)) == 3  # kept, blended, stretched
    got, scale = inverse_frequencies(RopeConfig(theta=500000.0, freq_factors=factors), 16)
    assert scale == 1.0
    assert torch.allclose(got, wanted, rtol=1e-6)


def test_rotations_reach_past_the_first_table(tiny) -> None:
    driver = Driver(make_runner(tiny, num_pages=260))
    tokens = random_tokens(4100, seed=2)
    sequence = driver.add(tokens)
    driver.run(sequence, 2050)
    expected = reference_logits(tiny[0], tokens)[-1]
    assert (sequence.logits[-1] - expected).abs().max().item() < 1e-3


def test_physical_cores_are_among_the_cpus() -> None:
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)
