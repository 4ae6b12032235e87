"""The search itself against transformers, on a random model's log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagetrie.engine.beam_search import Beam, BeamSearch, common_prefix
from tests.budget import first
from tests.models.tiny import tiny_model

PROMPTS = [[5, 9, 100], [200, 3, 44, 44, 90, 12]]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama").eval()


@torch.inference_mode()
def searched(model: Any, prompt: list[int], **options: Any) -> list[Beam]:
    """Our search with the whole of every sequence computed anew in each step."""
    search = BeamSearch(**options)
    while not search.done:
        ids = torch.tensor([[*prompt, *beam.tokens] for beam in search.live])
        logprobs = model(ids).logits[:, -1].float().log_softmax(-1)
        values, tokens = logprobs.topk(min(search.candidates, logprobs.shape[-1]))
        parents = search.advance(
            [list(zip(t, v, strict=True)) for t, v in zip(tokens.tolist(), values.tolist(), strict=True)]
        )
        assert len(parents) == len(search.live)
    return search.best(search.width)


STOPPING = (True, False, "never")


@pytest.mark.parametrize(
    ("width", "max_tokens", "ends", "length_penalty", "early_stopping"),
    first(
        4,
        [
            (4, 8, 12, 1.0, False),
            *((2, 6, 40, -1.0, early) for early in STOPPING),
            *((4, 8, 12, 1.0, early) for early in (True, "never")),
            *(
                (*sizes, penalty, early)
                for sizes in ((4, 12, 12), (2, 9, 40), (5, 6, 0), (3, 1, 5), (4, 20, 3))
                for penalty in (1.0, 0.0, 2.0, -1.0)
                for early in STOPPING
            ),
        ],
    ),
)
def test_all_hypotheses_are_those_of_transformers(
    model: Any, width: int, max_tokens: int, ends: int, length_penalty: float, early_stopping: bool | str
) -> None:
    end_ids = list(range(7, 7 + 6 * ends, 6))
    for prompt in PROMPTS:
        theirs = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=end_ids or None,
            pad_token_id=287,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            return_dict_in_generate=True,
            output_scores=True,
        )
        ours = searched(
            model,
            prompt,
            width=width,
            max_tokens=max_tokens,
            end_ids=end_ids,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        sequences = [_until_padding(ids[len(prompt) :], end_ids) for ids in theirs.sequences.tolist()]
        assert [[*beam.tokens, *([] if beam.end is None else [beam.end])] for beam in ours] == sequences
        assert [beam.score for beam in ours] == pytest.approx(theirs.sequences_scores.tolist(), rel=1e-5, abs=1e-4)
        for beam in ours:
            assert [entry.token_id for entry in beam.logprobs] == beam.tokens


def _until_padding(ids: list[int], end_ids: list[int]) -> list[int]:
    for place, token in enumerate(ids):
        if token in end_ids:
            return ids[: place + 1]
    return ids


def test_an_interrupted_search_gives_what_it_has_best_first() -> None:
    search = BeamSearch(width=2, max_tokens=10, end_ids=[0], length_penalty=1.0)
    assert search.candidates == 4
    search.advance([[(1, -0.1), (0, -0.5), (2, -3.0), (3, -4.0)]])
    assert [beam.tokens for beam in search.live] == [[1], [2]] and not search.done
    best = search.best(3)
    assert [(beam.tokens, beam.end) for beam in best] == [([1], None), ([], 0), ([2], None)]
    assert [beam.score for beam in best] == [-0.1, -0.5, -3.0]


def test_common_prefix() -> None:
    assert common_prefix([[1, 2, 3], [1, 2, 4], [1, 2]]) == 2
    assert common_prefix([[], [1]]) == 0
    assert common_prefix([[1, 2]]) == 2
