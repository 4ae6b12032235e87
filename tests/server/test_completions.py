"""/v1/completions: prompts of all shapes, echo, log-probabilities, choices."""

from __future__ import annotations

import pytest

from tests.server.double import BOS, ByteTokenizer, EngineDouble
from tests.server.test_chat import events

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


async def test_whole_answer_has_openais_form(site):
    response = await site.post(PATH, {"prompt": "hi", "model": "also-tiny"})
    assert response.json() == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1234,
        "model": "also-tiny",
        "system_fingerprint": "fp_x",
        "choices": [{"index": 0, "text": "Hello!", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 6,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 0, "pagetrie": {"pool": 0, "ram": 0, "disk": 0, "store": 0}},
        },
    }


async def test_limit_is_16_tokens_unless_told(make_site):
    site = make_site(EngineDouble(texts=["x" * 40]))
    choice = (await site.post(PATH, {"prompt": "hi"})).json()["choices"][0]
    assert choice["text"] == "x" * 16 and choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["a", "b"], [[BOS, 97], [BOS, 98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
async def test_prompt_shapes(site, prompt, ids):
    response = await site.post(PATH, {"prompt": prompt})
    assert response.status_code == 200
    assert [list(stream.request.prompt_ids) for stream in site.engine.streams] == ids
    assert response.json()["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_choices_are_numbered_across_prompts(make_site):
    site = make_site(EngineDouble(texts=["p", "qq"]))
    body = {"prompt": ["a", "bb"], "n": 2, "echo": True}
    expected = ["ap", "aqq", "bbp", "bbqq"]
    answer = (await site.post(PATH, body)).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(expected))
    assert answer["usage"]["prompt_tokens"] == 5 and answer["usage"]["completion_tokens"] == 6
    stream = await site.post(PATH, {**body, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, usage, _ = events(stream.text)
    texts = ["", "", "", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == expected
    assert usage["usage"] == answer["usage"] and usage["choices"] == []


async def test_echo_with_logprobs_covers_the_prompt_and_streams_alike(make_site):
    site = make_site(EngineDouble(texts=["xy"]))
    body = {"prompt": "hé", "echo": True, "logprobs": 1}
    logprobs = (await site.post(PATH, body)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["<s>", "h", "\\xc3", "\\xa9", "x", "y"]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 3]
    assert logprobs["token_logprobs"] == [None, *[-0.5] * 5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1:] == [{token: -0.5} for token in logprobs["tokens"][1:]]
    streamed = events((await site.post(PATH, {**body, "stream": True})).text)[:-1]
    parts = [chunk["choices"][0] for chunk in streamed]
    assert parts[0]["text"] == "hé" and parts[-1]["finish_reason"] == "stop"
    for key in logprobs:
        assert [item for part in parts if part["logprobs"] for item in part["logprobs"][key]] == logprobs[key]


async def test_echo_of_ids_gives_their_text(site):
    answer = (await site.post(PATH, {"prompt": [BOS, 104, 105], "echo": True, "max_tokens": 0})).json()
    assert answer["choices"][0]["text"] == "hi" and answer["choices"][0]["finish_reason"] == "length"


async def test_zero_logprobs_still_names_the_chosen_token(site):
    logprobs = (await site.post(PATH, {"prompt": "a", "logprobs": 0})).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{token: -0.5} for token in "Hello!"]


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[97], []]])
async def test_empty_prompts_are_refused_when_no_token_is_put_in_front(make_site, prompt):
    site = make_site(tokenizer=ByteTokenizer(add_bos=False))
    response = await site.post(PATH, {"prompt": prompt})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"
    assert (await site.post(PATH, {"prompt": "next"})).status_code == 200


@pytest.mark.parametrize("prompt", [None, 1, 1.5, True, {}, [1.5], [True], ["a", 1], [1, "a"], [["a"]], [[None]]])
async def test_prompts_of_other_types_are_refused(site, prompt):
    response = await site.post(PATH, {"prompt": prompt})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("ids", [[-1], [258], [97, 10**30]])
async def test_ids_outside_the_vocabulary_are_refused(site, ids):
    response = await site.post(PATH, {"prompt": ids})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


async def test_if_one_prompt_is_refused_none_runs(site):
    response = await site.post(PATH, {"prompt": ["a", "b" * 300]})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert [stream.closed.is_set() for stream in site.engine.streams] == [True]
