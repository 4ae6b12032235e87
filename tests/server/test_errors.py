"""Every refusal: its status, OpenAI's error form, and the field it names."""

from __future__ import annotations

import pytest

from pagetrie.errors import DeadlineExceededError, EngineError
from pagetrie.server.fields import IGNORED_FIELDS, UNSUPPORTED_FIELDS
from tests.server.double import EngineDouble
from tests.server.test_chat import HI, events

pytestmark = pytest.mark.anyio


def error_of(response) -> dict:
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"), ("temperature", -1), ("temperature", True), ("top_p", 0), ("top_p", 1.5),
        ("top_k", -2), ("top_k", 1.5), ("min_p", 2), ("seed", "x"), ("seed", 2**64), ("n", 0), ("n", 1000),
        ("n", True), ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0),
        ("logit_bias", []), ("logit_bias", {"x": 1}), ("logit_bias", {"65": "1"}), ("logit_bias", {"65": 101}),
        ("logit_bias", {"65": 10**400}), ("logit_bias", {"999": 1}), ("logit_bias", {"-1": 1}),
        ("stop", 5), ("stop", [1]), ("stop", [""]), ("stop", ["x"] * 17), ("stop_token_ids", "x"),
        ("stop_token_ids", [999]), ("stop_token_ids", [True]), ("max_tokens", -1), ("max_tokens", "5"),
        ("max_completion_tokens", -1), ("min_tokens", -1), ("stream", "yes"), ("stream_options", {}),
        ("logprobs", 1), ("top_logprobs", 5), ("cache_salt", ""), ("cache_salt", 5), ("cache_prompt", "no"),
        ("priority", 1.5), ("priority", "high"), ("timeout", "long"),
        ("tool_choice", "required"), ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tools", {}), ("tools", [1]), ("response_format", "text"), ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_object"}), ("messages", None), ("messages", []), ("messages", "hi"),
        ("chat_template_kwargs", []), ("chat_template_kwargs", {"messages": []}), ("chat_template", "{{ x }}"),
        ("functions", [{}]), ("audio", {}), ("reasoning_effort", "high"), ("model", 5), ("no_such_field", 1),
        ("prompt", "hi"),
    ],
)  # fmt: skip
async def test_a_bad_field_is_named(site, field, value):
    response = await site.post("/v1/chat/completions", {**HI, field: value})
    error = error_of(response)
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0] == field
    assert not site.engine.streams


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages.0"),
        ({"content": "x"}, "messages.0.role"),
        ({"role": "king", "content": "x"}, "messages.0.role"),
        ({"role": ["user"], "content": "x"}, "messages.0.role"),
        ({"role": "user"}, "messages.0.content"),
        ({"role": "user", "content": None}, "messages.0.content"),
        ({"role": "user", "content": 5}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.0.content.0"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0"),
        ({"role": "user", "content": [{"type": []}]}, "messages.0.content.0"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages.0.tool_calls.0"),
    ],
)
async def test_a_bad_message_is_located(site, message, param):
    response = await site.post("/v1/chat/completions", {"messages": [message]})
    assert response.status_code == 400 and error_of(response)["param"] == param


@pytest.mark.parametrize(
    ("field", "value"),
    [("suffix", "end"), ("best_of", 0), ("logprobs", 21), ("logprobs", True), ("echo", "yes"), ("messages", [])],
)
async def test_a_bad_completion_field_is_named(site, field, value):
    response = await site.post("/v1/completions", {"prompt": "x", field: value})
    assert response.status_code == 400 and error_of(response)["param"] == field


async def test_best_of_may_equal_n(site):
    assert (await site.post("/v1/completions", {"prompt": "x", "n": 2, "best_of": 2})).status_code == 200
    assert (await site.post("/v1/completions", {"prompt": "x", "best_of": 1, "suffix": None})).status_code == 200


async def test_documented_fields_are_accepted(site):
    ignored = {name: {"any": ["thing"]} for name in IGNORED_FIELDS}
    neutral = {name: values[0] for name, (_, values) in UNSUPPORTED_FIELDS.items() if values}
    nulls = {name: None for name, (_, values) in UNSUPPORTED_FIELDS.items() if not values}
    assert (await site.post("/v1/chat/completions", {**HI, **ignored, **neutral, **nulls})).status_code == 200
    assert all(reason for reason in IGNORED_FIELDS.values())


async def test_contradicting_limits(site):
    response = await site.post("/v1/chat/completions", {**HI, "max_tokens": 1, "max_completion_tokens": 2})
    assert response.status_code == 400
    body = {**HI, "max_tokens": 2, "max_completion_tokens": 2, "min_tokens": 3}
    assert error_of(await site.post("/v1/chat/completions", body))["param"] == "min_tokens"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b'"x"', b"null", b'{"messages": NaN}', b'{"a": 1e', b"\xff\xfe", b"[" * 100_000,
     b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"temperature": 1e999, "messages": []}',
     b'{"n": ' + b"9" * 10_000 + b"}"],
)  # fmt: skip
async def test_bodies_that_are_no_json_object(site, content):
    async with site.client() as client:
        response = await client.post(
            "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
        )
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_other_media_types_are_refused(site, media):
    async with site.client() as client:
        response = await client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": media})
    assert response.status_code == 415 and error_of(response)["code"] == "unsupported_media_type"


async def test_json_with_parameters_is_json(site):
    async with site.client() as client:
        response = await client.post(
            "/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "Application/JSON; charset=utf-8"}
        )
    assert response.status_code == 200


async def test_routes_and_methods(site):
    response = await site.get("/v1/nothing")
    assert response.status_code == 404 and error_of(response)["code"] == "not_found"
    response = await site.get("/v1/completions")
    assert response.status_code == 405 and error_of(response)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


async def test_unknown_model(site):
    response = await site.post("/v1/chat/completions", {**HI, "model": "gpt-9"})
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found" and error_of(response)["param"] == "model"
    assert (await site.get("/v1/models/gpt-9")).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_overflow_is_a_400_with_both_numbers_before_any_stream(site, stream):
    body = {"messages": [{"role": "user", "content": "x" * 500}], "stream": stream}
    response = await site.post("/v1/chat/completions", body)
    error = error_of(response)
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert "200" in error["message"] and "518" in error["message"]


async def test_a_full_queue_asks_to_retry(make_site):
    site = make_site(EngineDouble(max_queue=0))
    response = await site.post("/v1/chat/completions", {**HI, "stream": True})
    assert response.status_code == 429 and response.headers["retry-after"] == "1"
    assert error_of(response)["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_timeout_is_told_and_not_retried(make_site, caplog, stream):
    late = DeadlineExceededError(2.0, tokens=2)
    site = make_site(EngineDouble(texts=["abcdef"], fail_after=1, failure=late))
    response = await site.post("/v1/chat/completions", {**HI, "stream": stream})
    if stream:
        *chunks, last = events(response.text)
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "ab"
        error = last["error"]
    else:
        assert response.status_code == 504 and response.headers["x-should-retry"] == "false"
        error = error_of(response)
    assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
    assert error["message"] == "the request's timeout of 2 s passed after 2 generated tokens"
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("failure", "message"),
    [(RuntimeError("secret detail"), "The server failed"), (EngineError("the model failed"), "the model failed")],
)
async def test_failures_are_logged_once_and_told_without_internals(make_site, caplog, failure, message):
    site = make_site(EngineDouble(texts=["abcdef"], fail_after=1, failure=failure))
    whole = await site.post("/v1/chat/completions", HI)
    assert whole.status_code == 500 and error_of(whole)["type"] == "server_error"
    assert message in error_of(whole)["message"] and "secret" not in whole.text
    assert len([record for record in caplog.records if record.exc_info]) == 1
    caplog.clear()
    streamed = await site.post("/v1/chat/completions", {**HI, "stream": True})
    *chunks, last = events(streamed.text)
    assert streamed.status_code == 200 and "secret" not in streamed.text
    assert "ab" in "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert message in last["error"]["message"]
    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert all(stream.closed.is_set() for stream in site.engine.streams)


async def test_a_dead_engine_is_told(make_site):
    site = make_site(EngineDouble(alive=False))
    assert (await site.get("/health")).status_code == 503
    assert (await site.post("/v1/chat/completions", HI)).status_code == 500


async def test_a_crash_before_the_engine_is_answered_and_logged_once(site, caplog):
    def crash(text: str) -> None:
        raise ZeroDivisionError("secret detail")

    site.tokenizer.before_encode = crash
    response = await site.post("/v1/chat/completions", HI)
    assert response.status_code == 500 and error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text
    [record] = [record for record in caplog.records if record.exc_info]
    assert record.exc_info[0] is ZeroDivisionError
