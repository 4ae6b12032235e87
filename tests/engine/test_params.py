"""Sampling parameters are checked once, at the boundary, with the limit and the value in the message."""

from __future__ import annotations

import pytest

from pagetrie.engine.params import SamplingParams
from pagetrie.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-40),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("inf")),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("stop", ["x"] * 17),
        ("stop", [""]),
        ("stop_token_ids", list(range(129))),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
    ],
)
def test_out_of_range(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert refused.value.param == name
    assert name in refused.value.message
    assert refused.value.status == 400


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
