"""When two runs of one prompt count as equal: same tokens, or a difference that starts at a near-tie.

A cached and a cold run sum in another order, so logits differ by rounding. A wrong page gives another distribution
altogether, at once (design rule: the bound is on logits, tokens may differ only in a near-tie).
"""

from __future__ import annotations

from typing import Any

NEAR_TIE = 0.05
"""Largest gap, in nats, between the two likeliest tokens at which two runs may choose differently."""


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare two /v1/completions choices made with ``logprobs >= 2`` at temperature 0."""
    first, second = one["logprobs"], other["logprobs"]
    for position, (token, theirs) in enumerate(zip(first["tokens"], second["tokens"], strict=False)):
        if token == theirs:
            continue
        top = sorted(first["top_logprobs"][position].values(), reverse=True)
        assert top[0] - top[1] < NEAR_TIE, (position, token, theirs, top, one["text"], other["text"])
        return
    assert one["text"] == other["text"]
    assert one["finish_reason"] == other["finish_reason"]
