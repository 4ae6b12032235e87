"""/v1/contexts over an engine with the toy model: what is computed, kept and told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from pagetrie.engine.loop import EngineLoop
from pagetrie.server.warm import WarmPrompt
from tests.engine.toy import ToyVocabulary, World, expected
from tests.server.conftest import Site
from tests.server.double import ByteTokenizer
from tests.server.test_chat import events

pytestmark = pytest.mark.anyio
RULES = "These are the rules of the game."


class Client:
    """A site over a running engine, and calls to it."""

    def __init__(self, warm: Sequence[WarmPrompt] = (), **options: Any) -> None:
        self.now = 0.0
        self.world = World(clock=lambda: self.now, num_pages=80, max_model_len=300, **options)
        loop = EngineLoop(self.world.engine)
        site = Site(tokenizer=ByteTokenizer(add_bos=False), options={"loop": loop, "context_ttl": 60.0, "warm": warm})
        self.app = site.app
        self.template = site.template
        self.loop = loop
        self.http = site.client()

    async def call(self, method: str, path: str, status: int = 200, **body: Any) -> Any:
        response = await self.http.request(method, path, json=body or None)
        assert response.status_code == status, response.text
        return response.json()

    async def create(self, **body: Any) -> Any:
        return await self.call("POST", "/v1/contexts", **body)

    async def complete(self, **body: Any) -> Any:
        return await self.call("POST", "/v1/completions", temperature=0, **body)

    async def chat(self, **body: Any) -> Any:
        return await self.call("POST", "/v1/chat/completions", temperature=0, **body)


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Client]:
    client = Client(**options)
    async with client.app.router.lifespan_context(client.app), client.http:
        yield client
    client.world.check()


def written(ids: list[int]) -> str:
    return b"".join(map(ToyVocabulary().token_bytes, ids)).decode()


def tokens(text: str) -> list[int]:
    return list(text.encode())


async def test_create_computes_and_tells_what_it_keeps():
    async with serving() as client:
        made = await client.create(prompt=RULES)
        assert made["id"].startswith("c") and made["object"] == "context"
        assert (made["tokens"], made["held_tokens"], made["pages"]) == (32, 32, 8)
        assert (made["ttl"], made["expires_in"]) == (60, 60)
        assert (made["usage"]["prompt_tokens"], made["usage"]["completion_tokens"]) == (32, 0)
        assert made["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        again = await client.create(prompt=RULES, ttl=5)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 31 and again["ttl"] == 5
        assert client.world.cache.stats().pinned_pages == 8
        listed = await client.call("GET", "/v1/contexts")
        assert [entry["id"] for entry in listed["data"]] == [made["id"], again["id"]]


async def test_completions_go_on_from_a_context_and_leave_it_as_it_is():
    async with serving() as client:
        made = await client.create(prompt=RULES)
        for more in (" Play!", tokens(" Play!")):
            answer = await client.complete(context=made["id"], prompt=more, max_tokens=8)
            assert answer["choices"][0]["text"] == written(expected(tokens(RULES + " Play!"), 8))
            assert answer["usage"]["prompt_tokens"] == 38
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
        straight = await client.complete(context=made["id"], max_tokens=4, echo=True)
        assert straight["choices"][0]["text"] == RULES + written(expected(tokens(RULES), 4))
        assert (await client.call("GET", f"/v1/contexts/{made['id']}"))["tokens"] == 32


async def test_forks_share_and_go_their_own_ways():
    async with serving() as client:
        made = await client.create(prompt=RULES)
        computed = client.world.runner.computed_tokens
        forks = (await client.call("POST", f"/v1/contexts/{made['id']}/fork", n=4))["data"]
        assert client.world.runner.computed_tokens == computed
        assert client.world.cache.stats().pinned_pages == 8
        assert len({fork["id"] for fork in forks}) == 4
        for number, fork in enumerate(forks):
            body = {"context": fork["id"], "prompt": f" Move {number}", "max_tokens": 5, "append": True}
            answer = await client.complete(**body)
            assert answer["choices"][0]["text"] == written(expected(tokens(f"{RULES} Move {number}"), 5))
            assert (await client.call("GET", f"/v1/contexts/{fork['id']}"))["tokens"] == 32 + 7 + 5
            ids = [*tokens(f"{RULES} Move {number}"), *expected(tokens(f"{RULES} Move {number}"), 5)]
            more = await client.complete(context=fork["id"], prompt=" And?", max_tokens=3)
            assert more["choices"][0]["text"] == written(expected([*ids, *tokens(" And?")], 3))
            assert more["usage"]["prompt_tokens_details"]["cached_tokens"] == 43
        for context in (made, *forks):
            deleted = await client.call("DELETE", f"/v1/contexts/{context['id']}")
            assert deleted == {"id": context["id"], "object": "context", "deleted": True}
        assert client.world.cache.stats().active_pages == 0
        assert (await client.call("GET", "/v1/contexts"))["data"] == []


async def test_a_chat_grows_turn_by_turn_and_hits_to_its_last_token():
    async with serving() as client:
        made = await client.create(messages=[{"role": "system", "content": RULES}])
        text = f"system: {RULES}\n"
        assert made["tokens"] == len(text)
        ids = tokens(text)
        for turn in ("Hello", "And then?"):
            body = {"messages": [{"role": "user", "content": turn}], "max_tokens": 6, "append": True}
            answer = await client.chat(context=made["id"], **body)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= len(ids) - 1  # all but the last token drawn, which no step has computed
            ids += tokens(f"user: {turn}\nassistant: " if turn == "Hello" else f"\nuser: {turn}\nassistant: ")
            drawn = expected(ids, 6)
            assert answer["choices"][0]["message"]["content"] == written(drawn)
            assert answer["usage"]["prompt_tokens"] == len(ids)
            ids += drawn
            # The toy's template writes a newline after the message, which the answer itself doesn't have.
        assert (await client.call("GET", f"/v1/contexts/{made['id']}"))["tokens"] == len(ids)


async def test_append_computes_ahead_and_a_chat_may_go_on_with_no_new_message():
    async with serving() as client:
        made = await client.create(messages=[{"role": "system", "content": RULES}])
        more = {"messages": [{"role": "user", "content": "Hi"}]}
        grown = await client.call("POST", f"/v1/contexts/{made['id']}/append", **more)
        ids = tokens(f"system: {RULES}\nuser: Hi\n")
        assert grown["tokens"] == grown["held_tokens"] == len(ids)
        assert grown["usage"]["prompt_tokens_details"]["cached_tokens"] == made["tokens"]
        streamed = await client.http.post(
            "/v1/chat/completions",
            json={"context": made["id"], "temperature": 0, "max_tokens": 4, "stream": True, "append": True},
        )
        *chunks, _ = events(streamed.text)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert text == written(expected([*ids, *tokens("assistant: ")], 4))
        raw = await client.create(prompt="abc")
        grown = await client.call("POST", f"/v1/contexts/{raw['id']}/append", prompt="def")
        assert grown["tokens"] == 6
        answer = await client.complete(context=raw["id"], max_tokens=3)
        assert answer["choices"][0]["text"] == written(expected(tokens("abcdef"), 3))


async def test_a_template_that_rewrites_what_was_said_is_followed(monkeypatch: pytest.MonkeyPatch):
    """A template may drop or trim what came before; then the chat is tokenised anew and hits as far as it agrees."""
    async with serving() as client:
        made = await client.create(messages=[{"role": "system", "content": RULES}])
        monkeypatch.setattr(client.template, "render", lambda messages, *_, **__: f"system: {RULES} ({len(messages)})")
        answer = await client.chat(context=made["id"], messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
        assert answer["choices"][0]["message"]["content"] == written(expected(tokens(f"system: {RULES} (2)"), 3))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(f"system: {RULES}")


async def test_salts_own_contexts_and_others_are_not_found():
    async with serving() as client:
        made = await client.create(prompt=RULES, cache_salt="alice")
        path = f"/v1/contexts/{made['id']}"
        errors = []
        for target in (path, f"{path}?cache_salt=bob", "/v1/contexts/c999?cache_salt=alice"):
            error = (await client.call("GET", target, 404))["error"]
            assert (error["param"], error["code"]) == ("context", "context_not_found")
            errors.append(error["message"].replace("c999", made["id"]))
            await client.call("DELETE", target, 404)
        assert len(set(errors)) == 1
        for body in ({}, {"cache_salt": "bob"}):
            await client.call("POST", f"{path}/fork", 404, n=1, **body)
            await client.call("POST", f"{path}/append", 404, prompt="x", **body)
            await client.call("POST", "/v1/completions", 404, context=made["id"], prompt="x", **body)
            await client.call("POST", "/v1/chat/completions", 404, context=made["id"], messages=[], **body)
        answer = await client.complete(context=made["id"], prompt="x", cache_salt="alice", max_tokens=2)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        stranger = await client.complete(prompt=RULES + "x", max_tokens=2)
        assert stranger["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await client.call("GET", "/v1/contexts"))["data"] == []


async def test_contexts_expire():
    async with serving() as client:
        made = await client.create(prompt=RULES, ttl=10)
        client.now = 9.0
        assert (await client.call("GET", f"/v1/contexts/{made['id']}"))["expires_in"] == 10
        client.now = 19.0
        await client.call("GET", f"/v1/contexts/{made['id']}", 404)
        assert client.world.cache.stats().pinned_pages == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("/v1/contexts", {}, 400, "prompt", "Exactly one of"),
        ("/v1/contexts", {"prompt": "a", "messages": []}, 400, "prompt", "Exactly one of"),
        ("/v1/contexts", {"prompt": ["a", "b"]}, 400, "prompt", "a string or an array of token ids"),
        ("/v1/contexts", {"prompt": ""}, 400, "prompt", "empty"),
        ("/v1/contexts", {"messages": []}, 400, "messages", "at least one message"),
        ("/v1/contexts", {"prompt": "a", "ttl": 0}, 400, "ttl", "greater than 0"),
        ("/v1/contexts", {"prompt": "a", "ttl": 1e9}, 400, "ttl", "less than or equal to 604800"),
        ("/v1/contexts", {"prompt": "a", "cache_salt": ""}, 400, "cache_salt", "at least 1"),
        ("/v1/contexts", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt", "no place"),
        ("/v1/contexts", {"prompt": "a" * 301}, 400, "prompt", "300 tokens"),
        ("/v1/contexts/{id}/fork", {"n": 0}, 400, "n", "between 1 and 128"),
        ("/v1/contexts/{id}/fork", {"m": 1}, 400, "m", "Unknown parameter"),
        ("/v1/contexts/{id}/append", {}, 400, "prompt", "Exactly one of"),
        ("/v1/contexts/{id}/append", {"messages": [{"role": "user", "content": "x"}]}, 400, "messages", "plain prompt"),
        ("/v1/completions", {"prompt": "a", "append": True}, 400, "append", "needs a 'context'"),
        ("/v1/completions", {"context": "{id}", "append": True, "n": 2}, 400, "append", "n is 2"),
        ("/v1/completions", {"context": "{id}", "append": True, "stop": "x"}, 400, "append", "stop string"),
        ("/v1/completions", {"context": "{id}", "prompt": ["a", "b"]}, 400, "prompt", "array of token ids"),
        ("/v1/chat/completions", {"context": "{id}", "messages": []}, 400, "messages", "use /v1/completions"),
    ],
)
async def test_what_makes_no_sense_is_refused_and_leaves_nothing(path, body, status, param, words):
    async with serving() as client:
        made = await client.create(prompt="abc")
        filled = json.loads(json.dumps(body).replace("{id}", made["id"]))
        error = (await client.call("POST", path.replace("{id}", made["id"]), status, **{"cache_salt": None, **filled}))[
            "error"
        ]
        assert error["param"] == param and words in error["message"]
        assert len(client.world.engine.contexts) == 1
        assert client.world.cache.stats().pinned_pages == 1


async def test_limits_answer_429():
    async with serving(hold_limit=10, max_contexts=2) as client:
        made = await client.create(prompt=RULES)
        error = (await client.call("POST", "/v1/contexts", 429, prompt="x" * 12))["error"]
        assert error["code"] == "pinned_pages_limit" and "may take 10 pages, 8 are taken" in error["message"]
        assert len(client.world.engine.contexts) == 1
        error = (await client.call("POST", f"/v1/contexts/{made['id']}/fork", 429, n=2))["error"]
        assert error["code"] == "context_limit" and "At most 2 contexts" in error["message"]


async def test_a_creation_that_fails_leaves_no_context():
    async with serving() as client:
        client.world.runner.fail_on = lambda plan: True
        await client.call("POST", "/v1/contexts", 500, prompt=RULES)
        assert len(client.world.engine.contexts) == 0


async def test_a_second_appender_is_told_to_wait_before_the_stream_begins():
    async with serving() as client:
        made = await client.create(prompt=RULES)
        context = next(iter(client.world.engine.contexts))
        context.growing = True
        body = {"context": made["id"], "prompt": "x", "append": True, "stream": True}
        error = (await client.call("POST", "/v1/completions", 409, **body))["error"]
        assert error["code"] == "context_busy"
        context.growing = False


async def test_questions_after_the_end_are_refused():
    client = Client()
    client.loop.start()
    await client.loop.stop()
    response: httpx.Response = await client.http.get("/v1/contexts")
    assert response.status_code in (500, 503)
    await client.http.aclose()
