"""The API's promises on the real model (pain.md, section g)."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.e2e.conftest import BIG_CONTEXT, Server
from tests.e2e.test_prefix_cache import STORY, tokens

CHAT = [{"role": "system", "content": STORY}, {"role": "user", "content": "What did the keeper see?"}]


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [x for item in value.values() for x in numbers(item)]
    if isinstance(value, list):
        return [x for item in value for x in numbers(item)]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_cached_tokens_are_always_there(big: Server, chat: bool, stream: bool) -> None:
    """G1: 0 on a miss, above 0 on a hit, never above the prompt; in chat and completions, streamed or not."""
    big.reset()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt: dict[str, Any] = {"messages": CHAT} if chat else {"prompt": STORY}
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    counts = []
    for _ in range(2):
        response = big.http.post(path, json={"model": big.model, "max_tokens": 2, **prompt, **options})
        assert response.status_code == 200
        if stream:
            events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
            assert events[-1] == "[DONE]"
            last = json.loads(events[-2])
            assert last["choices"] == []
            usage = last["usage"]
        else:
            usage = response.json()["usage"]
        counts.append((usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]))
    assert counts[0][0] == 0
    assert counts[1][0] == counts[1][1] - 1


@pytest.mark.parametrize("stops", [["lighthouse keeper"], ["house", "light"], ["keeper walked down to"], ["The"]])
def test_stop_strings_never_show_and_nothing_is_lost(big: Server, stops: list[str]) -> None:
    """G3: stops that span tokens, overlapping, at the start; the stream joins to the whole text."""
    body = {"prompt": STORY * 2, "max_tokens": 40, "temperature": 0}
    plain = big.complete(**body)["choices"][0]["text"]
    cuts = [at for stop in stops if (at := plain.find(stop)) >= 0]
    assert cuts, f"the model repeats the story; expected a stop in {plain!r}"
    whole = big.complete(**body, stop=stops)["choices"][0]
    assert whole["text"] == plain[: min(cuts)]
    assert whole["finish_reason"] == "stop"
    pieces = []
    with big.openai.completions.create(model=big.model, stream=True, stop=stops, **body) as stream:  # type: ignore[call-overload]
        pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == whole["text"]


def test_every_logprob_is_a_finite_number(big: Server) -> None:
    """G6: temperature 1, top_k 1, logprobs 5, echo."""
    answer = big.complete(STORY[:60], max_tokens=4, temperature=1, top_k=1, logprobs=5, echo=True)
    values = numbers(answer["choices"][0]["logprobs"])
    assert len(values) > 20
    assert all(math.isfinite(value) for value in values)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ""},
        {"prompt": [""]},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [10**9]},
        {"prompt": [-1]},
        {"prompt": "Hi", "max_tokens": 0},
        {"prompt": "Hi", "max_tokens": 0, "echo": True},
        {"prompt": "Hi", "max_tokens": 0, "echo": True, "logprobs": 1},
        {"prompt": "Hi", "max_tokens": 1},
        {"prompt": "\ufeff\u0000\U0001f600", "max_tokens": 1},
        {"prompt": "Hi", "logit_bias": {"999999": 1}},
        {"prompt": "Hi", "n": 100000},
        {"prompt": "Hi", "temperature": -1},
        {"prompt": "Hi", "stop": [""]},
        {"prompt": "Hi", "unheard_of": 1},
    ],
)
def test_odd_requests_are_answered_or_refused_and_the_next_is_fine(big: Server, fields: dict[str, Any]) -> None:
    """G7."""
    response = big.http.post("/v1/completions", json={"model": big.model, "temperature": 0, **fields})
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        error = response.json()["error"]
        assert error["message"]
        assert error["type"] == "invalid_request_error"
    elif fields.get("max_tokens") == 0:
        choice = response.json()["choices"][0]
        assert choice["text"] == ("Hi" if fields.get("echo") else "")
        assert response.json()["usage"]["completion_tokens"] == 0
        if fields.get("logprobs"):
            assert len(choice["logprobs"]["token_logprobs"]) == response.json()["usage"]["prompt_tokens"]
    assert big.complete("Hello", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_overflow_is_a_400_that_agents_understand(big: Server, stream: bool) -> None:
    """G8: context + 1 is refused before any SSE header; context - 1 ends by length after one token."""
    ids = (tokens(big, STORY) * 40)[: BIG_CONTEXT + 1]
    response = big.http.post("/v1/completions", json={"model": big.model, "prompt": ids, "stream": stream})
    assert response.status_code == 400
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(BIG_CONTEXT) in error["message"]
    assert str(BIG_CONTEXT + 1) in error["message"]
    if not stream:
        answer = big.complete(ids[: BIG_CONTEXT - 1], max_tokens=50)
        assert answer["usage"]["completion_tokens"] == 1
        assert answer["choices"][0]["finish_reason"] == "length"


def test_n_and_seeds(big: Server) -> None:
    """n choices differ, and a seed repeats them (over the same cache: a draw on the edge feels even rounding)."""
    ask = {"n": 3, "max_tokens": 12, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    big.complete("My favourite animal is", max_tokens=1)
    one, two = (big.complete("My favourite animal is", **ask) for _ in range(2))
    texts = [choice["text"] for choice in one["choices"]]
    assert len(set(texts)) == 3
    assert texts == [choice["text"] for choice in two["choices"]]
    assert one["usage"]["completion_tokens"] == 36
    assert one["usage"]["prompt_tokens"] == len(tokens(big, "My favourite animal is"))
