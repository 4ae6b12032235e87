"""The ``openai`` package against the server: its types, its streams, its exceptions."""

from __future__ import annotations

import asyncio

import openai
import pytest
from openai import AsyncOpenAI

from tests.server.double import EngineDouble

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "hi"}]


def client_of(server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0)


async def test_chat(make_site):
    site = make_site(EngineDouble(texts=["abcd", "xyz"]))
    async with site.running() as server, client_of(server) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, n=2, logprobs=True, top_logprobs=3, max_completion_tokens=3
        )
        assert [choice.message.content for choice in answer.choices] == ["abc", "xyz"]
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.role == "assistant"
        assert [entry.token for entry in answer.choices[1].logprobs.content] == ["x", "y", "z"]
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
        assert answer.usage.completion_tokens == 6
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert answer._request_id == answer.id


async def test_chat_stream(make_site):
    site = make_site(EngineDouble(texts=["abcd", "xyz"]))
    async with site.running() as server, client_of(server) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, n=2, stream=True, stream_options={"include_usage": True}
        )
        texts, ends, usage = ["", ""], [None, None], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends[choice.index] = choice.finish_reason or ends[choice.index]
        assert texts == ["abcd", "xyz"] and ends == ["stop", "stop"]
        assert usage.completion_tokens == 7 and usage.total_tokens == usage.prompt_tokens + 7


async def test_the_stream_helper_understands_the_chunks(make_site):
    site = make_site(EngineDouble(texts=["abcd"]))
    async with site.running() as server, client_of(server) as client:
        async with client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "abcd" and final.choices[0].message.role == "assistant"


async def test_cancelling_a_stream_closes_the_request(make_site):
    site = make_site(EngineDouble(texts=["abcdef"], gate=asyncio.Event()))
    async with site.running() as server, client_of(server) as client:
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await asyncio.wait_for(site.engine.streams[0].closed.wait(), 10)


async def test_completions(make_site):
    site = make_site(EngineDouble(texts=["abcd"]))
    async with site.running() as server, client_of(server) as client:
        answer = await client.completions.create(model="tiny", prompt=["q", "r"], echo=True, logprobs=2, best_of=1, n=1)
        assert [choice.text for choice in answer.choices] == ["qabcd", "rabcd"]
        assert answer.choices[1].logprobs.tokens == ["<s>", "r", "a", "b", "c", "d"]
        assert answer.choices[1].logprobs.text_offset == [0, 0, 1, 2, 3, 4]
        stream = await client.completions.create(model="tiny", prompt="q", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "abcd"


async def test_models(site):
    async with site.running() as server, client_of(server) as client:
        assert [model.id async for model in client.models.list()] == ["tiny", "also-tiny"]
        assert (await client.models.retrieve("tiny")).owned_by == "pagetrie"


@pytest.mark.parametrize(
    ("engine", "options", "kind", "code"),
    [
        ({}, {"model": "gpt-9"}, openai.NotFoundError, "model_not_found"),
        ({"max_len": 5}, {}, openai.BadRequestError, "context_length_exceeded"),
        ({}, {"temperature": -1}, openai.BadRequestError, None),
        ({}, {"extra_body": {"foo": 1}}, openai.BadRequestError, "unknown_parameter"),
        ({"max_queue": 0}, {}, openai.RateLimitError, "rate_limit_exceeded"),
        ({"fail_after": 0}, {}, openai.InternalServerError, "internal_error"),
    ],
)
async def test_errors_become_the_clients_exceptions(make_site, engine, options, kind, code):
    site = make_site(EngineDouble(**engine))
    async with site.running() as server, client_of(server) as client:
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **options})
        assert caught.value.code == code and caught.value.body["message"]


async def test_an_error_inside_a_stream_is_raised(make_site):
    site = make_site(EngineDouble(texts=["abcdef"], fail_after=1))
    async with site.running() as server, client_of(server) as client:
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        text = ""

        async def read() -> None:
            nonlocal text
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""

        with pytest.raises(openai.APIError, match="The server failed"):
            await read()
        assert text == "ab"
