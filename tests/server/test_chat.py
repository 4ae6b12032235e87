"""/v1/chat/completions: forms, parameters and what reaches the template and the engine."""

from __future__ import annotations

import json

import pytest

from pagetrie.kv import RequestKind
from tests.server.double import EngineDouble

pytestmark = pytest.mark.anyio

HI = {"messages": [{"role": "user", "content": "hi"}]}


def events(text: str) -> list:
    """The payloads of an event stream, framed exactly as OpenAI does."""
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


async def test_whole_answer_has_openais_form(make_site):
    site = make_site(EngineDouble(texts=["Hello!"], cached=4))
    response = await site.post("/v1/chat/completions", {**HI, "model": "tiny"})
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "chatcmpl-1"
    prompt = len("user: hi\nassistant: ")
    assert response.json() == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1234,
        "model": "tiny",
        "system_fingerprint": "fp_x",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": 6,
            "total_tokens": prompt + 6,
            "prompt_tokens_details": {"cached_tokens": 4, "pagetrie": {"pool": 4, "ram": 0, "disk": 0, "store": 0}},
        },
    }


async def test_stream_opens_each_choice_with_its_role_and_ends_with_usage(make_site):
    site = make_site(EngineDouble(texts=["abcd", "xy"]))
    body = {**HI, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    response = await site.post("/v1/chat/completions", body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]"
    for chunk in [*chunks, usage]:
        assert {key: chunk[key] for key in ("id", "object", "created", "model", "system_fingerprint")} == {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1234,
            "model": "tiny",
            "system_fingerprint": "fp_x",
        }
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert usage["usage"]["prompt_tokens"] == len("user: hi\nassistant: ")
    assert usage["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "pagetrie": {"pool": 0, "ram": 0, "disk": 0, "store": 0},
    }
    for index, text in ((0, "abcd"), (1, "xy")):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert own[0]["finish_reason"] is None
        assert "".join(choice["delta"].get("content", "") for choice in own) == text
        assert own[-1]["delta"] == {}
        assert [choice["finish_reason"] for choice in own].count("stop") == 1 and own[-1]["finish_reason"] == "stop"


async def test_stream_without_the_option_never_mentions_usage(site):
    response = await site.post("/v1/chat/completions", {**HI, "stream": True})
    *chunks, done = events(response.text)
    assert done == "[DONE]" and chunks
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_logprobs_name_tokens_with_their_bytes(make_site):
    site = make_site(EngineDouble(texts=["ab"]))
    body = {**HI, "logprobs": True, "top_logprobs": 2}
    whole = (await site.post("/v1/chat/completions", body)).json()["choices"][0]["logprobs"]
    assert whole == {
        "content": [
            {
                "token": token,
                "logprob": -0.5,
                "bytes": [ord(token)],
                "top_logprobs": [
                    {"token": token, "logprob": -0.5, "bytes": [ord(token)]},
                    {"token": "!", "logprob": -1.5, "bytes": [33]},
                ],
            }
            for token in "ab"
        ],
        "refusal": None,
    }
    streamed = await site.post("/v1/chat/completions", {**body, "stream": True})
    chunks = [chunk["choices"][0]["logprobs"] for chunk in events(streamed.text)[:-1]]
    assert [entry for part in chunks if part for entry in part["content"]] == whole["content"]


async def test_logprobs_without_alternatives(site):
    response = await site.post("/v1/chat/completions", {**HI, "logprobs": True})
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 6 and all(entry["top_logprobs"] == [] for entry in content)


async def test_parameters_reach_the_engine(site):
    body = {
        **HI,
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "presence_penalty": 0.2,
        "frequency_penalty": -0.3, "repetition_penalty": 1.1, "logit_bias": {"65": -100, "66": 1.5},
        "stop": "END", "stop_token_ids": [10], "ignore_eos": True, "min_tokens": 2, "max_completion_tokens": 9,
        "n": 2, "skip_special_tokens": False, "cache_salt": "team", "cache_prompt": False,
        "priority": -3, "timeout": 20,
        "response_format": {"type": "text"}, "tool_choice": "auto", "user": "u", "metadata": {"a": "b"}, "store": True,
        "prediction": None, "modalities": ["text"], "logprobs": False,
    }  # fmt: skip
    assert (await site.post("/v1/chat/completions", body)).status_code == 200
    request = site.engine.last
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 5, 0.1, 7)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.2, -0.3, 1.1)
    assert params.logit_bias == {65: -100.0, 66: 1.5}
    assert (tuple(params.stop), tuple(params.stop_token_ids)) == (("END",), (10,))
    assert (params.ignore_eos, params.min_tokens, params.max_tokens, params.n) == (True, 2, 9, 2)
    assert (params.skip_special_tokens, params.use_prefix_cache, params.logprobs) == (False, False, None)
    assert (request.namespace_salt, request.priority, request.timeout) == ("team", -3, 20.0)


async def test_defaults(site):
    nulls = dict.fromkeys(("temperature", "max_tokens", "n", "stop", "logit_bias", "seed", "cache_salt"))
    await site.post("/v1/chat/completions", {**HI, **nulls})
    request = site.engine.last
    assert request.params.max_tokens is None and request.params.temperature == 1.0 and request.params.n == 1
    assert request.params.use_prefix_cache and request.namespace_salt == ""
    assert request.priority == 0 and request.timeout is None and request.kind is RequestKind.CHAT
    assert bytes(request.prompt_ids) == b"user: hi\nassistant: "  # no second BOS: the template brings its own


async def test_messages_are_put_into_the_templates_shape(site):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": messages, "tools": tools, "chat_template_kwargs": {"mood": "calm"}, "tool_choice": "none"}
    assert (await site.post("/v1/chat/completions", body)).status_code == 200
    assert site.engine.last.kind is RequestKind.TOOL
    [seen] = site.template.calls
    assert seen["messages"][0] == {"role": "system", "content": messages[0]["content"]}
    assert seen["messages"][1]["content"] == ""
    assert seen["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert seen["messages"][2] == messages[2]
    assert seen["tools"] == tools and seen["mood"] == "calm" and seen["add_generation_prompt"] is True


async def test_continuing_the_final_message_asks_for_no_generation_prompt(site):
    await site.post("/v1/chat/completions", {**HI, "continue_final_message": True})
    await site.post("/v1/chat/completions", {**HI, "add_generation_prompt": False})
    first, second = site.template.calls
    assert (first["add_generation_prompt"], first["continue_final_message"]) == (False, True)
    assert (second["add_generation_prompt"], second["continue_final_message"]) == (False, False)


async def test_a_model_without_a_template_refuses_chat_but_completes(make_site):
    site = make_site(template=None)
    response = await site.post("/v1/chat/completions", HI)
    assert response.status_code == 400 and "template" in response.json()["error"]["message"]
    assert (await site.post("/v1/completions", {"prompt": "x"})).status_code == 200
