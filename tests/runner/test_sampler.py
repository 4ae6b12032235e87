"""Sampling against a plain reference written from the parameters' documentation."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from math import exp, log

import pytest
import torch

from pagetrie.engine.params import SamplingParams
from pagetrie.engine.runner import SampleSpec
from pagetrie.errors import EngineError
from pagetrie.runner import sampler
from pagetrie.runner.sampler import sample, token_logprobs, uniform
from tests.budget import first
from tests.runner.helpers import greedy, spec


def plain_distribution(logits: Sequence[float], s: SampleSpec) -> dict[int, float]:
    """Token -> probability, step by step in plain Python; only tokens that may be drawn."""
    p = s.params
    row = list(logits)
    for token, bias in p.logit_bias.items():
        row[token] += bias
    alive = {token: value for token, value in enumerate(row) if token not in set(s.banned_ids)}
    for token in set(s.prompt_ids) | set(s.output_ids):
        if token in alive:
            value = alive[token]
            alive[token] = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
    for token, count in Counter(s.output_ids).items():
        if token in alive:
            alive[token] -= p.frequency_penalty * count + p.presence_penalty
    order = sorted(alive, key=lambda t: (-alive[t], t))
    if p.greedy:
        return {order[0]: 1.0}
    top = alive[order[0]]
    weights = {t: exp((alive[t] - top) / p.temperature) for t in order}
    order = [t for t in order if weights[t] >= p.min_p * (1 - 1e-6)]
    if p.top_k > 0:
        order = order[: p.top_k]
    total, mass, kept = sum(weights[t] for t in order), 0.0, []
    for token in order:
        if mass >= p.top_p * total * (1 - 1e-9) and p.top_p < 1:
            break
        kept.append(token)
        mass += weights[token]
    return {t: weights[t] / sum(weights[k] for k in kept) for t in kept}


def drawn_distribution(
    logits: torch.Tensor, s: SampleSpec, monkeypatch: pytest.MonkeyPatch, points: int
) -> Counter[int]:
    """What the sampler draws over an even grid of uniform numbers: the distribution itself, without chance."""
    grid = iter([(i + 0.5) / points for i in range(points)])
    monkeypatch.setattr(sampler, "uniform", lambda seed, draw: next(grid))
    return Counter(r.token_id for r in sample(logits.unsqueeze(0), [0] * points, [s] * points))


CASES: dict[str, SampleSpec] = {
    "temperature": spec(SamplingParams(temperature=0.7)),
    "hot": spec(SamplingParams(temperature=3.0)),
    "top_k": spec(SamplingParams(top_k=5)),
    "top_k_all": spec(SamplingParams(top_k=10_000)),
    "top_k_1": spec(SamplingParams(top_k=1)),
    "top_p": spec(SamplingParams(top_p=0.8)),
    "top_p_tiny": spec(SamplingParams(top_p=1e-6)),
    "min_p": spec(SamplingParams(min_p=0.1)),
    "min_p_1": spec(SamplingParams(min_p=1.0)),
    "top_k_then_top_p": spec(SamplingParams(top_k=8, top_p=0.7)),
    "all": spec(SamplingParams(temperature=1.5, min_p=0.05, top_k=30, top_p=0.9)),
    "bias": spec(SamplingParams(logit_bias={3: 4.0, 17: -100.0, 40: 100.0}, temperature=30.0)),
    "banned": spec(SamplingParams(temperature=2.0, logit_bias={7: 5.0}), banned=[7, 0, 299]),
    "penalties": spec(
        SamplingParams(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.8),
        prompt=[1, 2, 2, 3, 250],
        output=[3, 3, 9, 40],
    ),
    "negative_penalties": spec(
        SamplingParams(repetition_penalty=0.6, presence_penalty=-1.5, frequency_penalty=-0.4, top_p=0.95),
        prompt=list(range(50)),
        output=[3, 3, 3, 9],
    ),
    "greedy_with_penalties": spec(greedy(repetition_penalty=1.9, frequency_penalty=2.0), output=[5, 5, 8, 8, 8, 1]),
}


@pytest.mark.parametrize("points", first(1, [250, 2000]))
@pytest.mark.parametrize("candidates", [4, 256])
@pytest.mark.parametrize("shape", ["smooth", "tied", "flat"])
@pytest.mark.parametrize("case", CASES)
def test_drawn_distribution_is_the_documented_one(
    case: str, shape: str, candidates: int, points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over an even grid a token of probability P is drawn points * P times, give or take one."""
    monkeypatch.setattr(sampler, "_CANDIDATES", candidates)
    torch.manual_seed(7)
    logits = torch.randn(307) * 2
    if shape == "tied":
        logits = logits.round()
    elif shape == "flat":
        logits = torch.zeros(307)
    expected = plain_distribution(logits.tolist(), CASES[case])
    drawn = drawn_distribution(logits, CASES[case], monkeypatch, points)
    assert set(drawn) <= set(expected)
    for token, probability in expected.items():
        assert abs(drawn[token] - points * probability) <= 1.01, token


def test_uniform_numbers_are_uniform_and_independent() -> None:
    """Chi-square over 64 bins of pairs of successive draws and of neighbouring seeds; 99.99 % bound."""
    for pairs in (
        [(uniform(3, i), uniform(3, i + 1)) for i in range(0, 20_000, 2)],
        [(uniform(s, 0), uniform(s + 1, 0)) for s in range(0, 20_000, 2)],
    ):
        bins = Counter((int(a * 8), int(b * 8)) for a, b in pairs)
        expected = len(pairs) / 64
        chi_square = sum((bins[a, b] - expected) ** 2 / expected for a in range(8) for b in range(8))
        assert chi_square < 113.0


def test_uniform_is_fixed_for_all_time() -> None:
    """A change of these values would change the text of every seeded request."""
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(2**64 - 1, 5)] == [
        0.12311943861730146,
        0.5826717794384204,
        0.5363207289114678,
        0.18406937836312898,
    ]
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)


def test_draws_do_not_hang_on_batch_or_order() -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 2000) * 3
    kinds = [SamplingParams(), SamplingParams(top_k=40), SamplingParams(top_p=0.9), greedy(), SamplingParams(min_p=0.2)]
    specs = [spec(kinds[i % 5], seed=i, output=[0] * (i % 3)) for i in range(40)]
    rows = [i % 4 for i in range(40)]
    alone = [sample(logits[[row]], [0], [s])[0].token_id for row, s in zip(rows, specs, strict=True)]
    assert [r.token_id for r in sample(logits, rows, specs)] == alone
    order = random.Random(0).sample(range(40), 40)
    shuffled = sample(logits, [rows[i] for i in order], [specs[i] for i in order])
    assert [r.token_id for r in shuffled] == [alone[i] for i in order]


def test_logits_are_left_as_they_were_and_plain_greedy_takes_the_first_maximum() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    before = logits.clone()
    specs = [
        spec(greedy()),
        spec(greedy(logit_bias={0: 50.0})),
        spec(SamplingParams(repetition_penalty=2.0), output=[1]),
    ]
    assert [r.token_id for r in sample(logits, [0, 0, 0], specs)][:2] == [1, 0]
    assert torch.equal(logits, before)


def test_logprobs_are_raw_sorted_and_finite() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, -torch.inf, 0.5, 2.0]])
    p = greedy(logprobs=4, logit_bias={3: 100.0, 0: 90.0}, presence_penalty=1.0)
    (result,) = sample(logits, [0], [spec(p, output=[1])])
    raw = torch.log_softmax(logits[0], -1)
    assert result.token_id == 0
    assert result.logprob == pytest.approx(raw[0].item())
    assert [token for token, _ in result.top] == [1, 2, 5, 0]
    assert [value for _, value in result.top] == pytest.approx(raw[[1, 2, 5, 0]].tolist())
    (only,) = sample(logits, [0], [spec(greedy(logprobs=0))])
    assert only.top == ()
    assert only.logprob == pytest.approx(raw[1].item())


def test_logprobs_of_impossible_tokens_are_clamped() -> None:
    logits = torch.tensor([[0.0, -torch.inf, -1e30, -torch.inf]])
    (result,) = token_logprobs(logits, [1], [4])
    assert result.logprob == -9999.0
    assert result.top == ((0, 0.0), (2, -9999.0), (1, -9999.0), (3, -9999.0))


def test_ties_at_the_edge_of_the_top_list_go_to_the_lower_id() -> None:
    logits = torch.zeros(2, 500)
    logits[1, 77] = 1.0
    results = token_logprobs(logits, [499, 77], [3, 2])
    assert [[t for t, _ in r.top] for r in results] == [[0, 1, 2], [77, 0]]
    assert results[0].logprob == pytest.approx(-log(500))


def test_more_logprobs_than_tokens() -> None:
    (result,) = token_logprobs(torch.tensor([[0.0, 1.0]]), [0], [20])
    assert [t for t, _ in result.top] == [1, 0]


def test_ids_outside_the_vocabulary_are_passed_over() -> None:
    p = greedy(logit_bias={10**6: 100.0, -1: 100.0}, repetition_penalty=1.3, presence_penalty=0.1)
    (result,) = sample(torch.tensor([[0.0, 2.0, 1.0]]), [0], [spec(p, prompt=[99], output=[-5, 3], banned=[7])])
    assert result.token_id == 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_numbers_are_an_error(bad: float) -> None:
    logits = torch.zeros(2, 8)
    logits[1, 3] = bad
    with pytest.raises(EngineError, match="finite"):
        sample(logits, [0, 1], [spec(greedy()), spec(SamplingParams())])
    with pytest.raises(EngineError, match="finite"):
        token_logprobs(logits, [0, 0], [0, 0])


def test_all_tokens_banned_is_an_error() -> None:
    with pytest.raises(EngineError, match="banned"):
        sample(torch.zeros(1, 4), [0], [spec(SamplingParams(), banned=[0, 1, 2, 3])])


def test_extreme_temperatures() -> None:
    logits = torch.tensor([[900.0, -900.0, 899.0]])
    cold = sample(logits, [0] * 50, [spec(SamplingParams(temperature=1e-4), seed=s) for s in range(50)])
    assert {r.token_id for r in cold} == {0}
    hot = sample(logits, [0] * 200, [spec(SamplingParams(temperature=1e6), seed=s) for s in range(200)])
    assert {r.token_id for r in hot} == {0, 1, 2}
