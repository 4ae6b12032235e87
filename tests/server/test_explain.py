"""Why a prompt missed: planted cases over an engine with the toy model, each of which must be named rightly."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.toy import expected
from tests.server.test_chat import events
from tests.server.test_contexts import Client, serving, tokens

pytestmark = pytest.mark.anyio
RULES = "You answer questions about the library. Be brief, be kind, and never make up an opening hour."


async def explained(client: Client, **body: Any) -> Any:
    answer = await client.complete(explain_cache=True, **{"max_tokens": 1, **body})
    (prompt,) = answer["explain_cache"]["prompts"]
    usage = answer["usage"]
    assert prompt["prompt_tokens"] == usage["prompt_tokens"]
    assert prompt["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert sum(prompt["cached_by_tier"].values()) == prompt["cached_tokens"]
    assert str(prompt["cached_tokens"]) in prompt["explanation"] or prompt["reason"] == "bypassed"
    # The same later, for whoever knows the request's id and salt.
    query = f"?cache_salt={body['cache_salt']}" if "cache_salt" in body else ""
    again = await client.call("GET", f"/v1/requests/{answer['id']}/cache{query}")
    assert again["prompts"][0]["reason"] == prompt["reason"]
    return prompt


def codes(prompt: Any) -> list[str]:
    return [advice["code"] for advice in prompt["advice"]]


async def test_everything_was_cached():
    async with serving() as client:
        await client.complete(prompt=RULES, max_tokens=1)
        prompt = await explained(client, prompt=RULES)
        assert prompt["reason"] == "complete" and prompt["cached_tokens"] == len(RULES) - 1


async def test_never_stored():
    async with serving() as client:
        prompt = await explained(client, prompt=RULES)
        assert prompt["reason"] == "never_stored" and prompt["cached_tokens"] == 0
        prompt = await explained(client, prompt=RULES + " A question that nobody has asked before.")
        assert prompt["reason"] in ("never_stored", "differs")  # the stored text goes on with the answer
        assert prompt["cached_tokens"] == len(RULES)


async def test_volatile_text_before_stable_text():
    """I6: the token at which it differs is named, and what is to be done about it."""
    async with serving() as client:
        await client.complete(prompt=f"Now: 10:41. {RULES}", max_tokens=1)
        prompt = await explained(client, prompt=f"Now: 10:59. {RULES}")
        assert prompt["reason"] == "differs"
        assert prompt["first_difference"] == {
            "position": 8,
            "before": "Now: 10:",
            "here": {"token": ord("5"), "token_text": "5", "text": "59. You answer q"},
            "stored": {"token": ord("4"), "token_text": "4", "text": "41. You answer q"},
        }
        assert codes(prompt) == ["volatile_before_stable"]


async def test_another_text_is_no_volatile_one():
    async with serving() as client:
        await client.complete(prompt="Now we sail over the sea to the harbour of the old town.", max_tokens=1)
        prompt = await explained(client, prompt=f"Now {RULES}")
        assert prompt["reason"] == "differs" and prompt["first_difference"]["position"] == 4 and codes(prompt) == []


async def test_a_rewritten_last_turn():
    async with serving() as client:
        first = await client.complete(prompt=RULES, max_tokens=12, ignore_eos=True)
        prompt = await explained(client, prompt=f"{RULES}an answer in other words, and a second question")
        assert prompt["reason"] == "differs" and codes(prompt) == ["rewritten_last_turn"]
        assert first["id"] in prompt["advice"][0]["text"]


async def test_a_rewritten_opening_of_the_last_turn():
    """I6: the words that opened the answer are part of the first prompt and missing from the second."""
    async with serving() as client:
        await client.complete(prompt=f"{RULES}\nassistant:<think>\n", max_tokens=30, ignore_eos=True)
        answer = expected(tokens(f"{RULES}\nassistant:<think>\n"), 30, eos=False)
        second = [*tokens(f"{RULES}\nassistant: "), *answer, *tokens("\nuser: and a second question")]
        prompt = await explained(client, prompt=second)
        assert prompt["reason"] == "differs" and codes(prompt) == ["rewritten_last_turn"]


async def test_other_questions_on_one_trunk_rewrite_nothing():
    """Even if they differ in their last words only, and the trunk was a prompt itself."""
    async with serving() as client:
        await client.complete(prompt=RULES, max_tokens=0)
        for question in ("When do you open?", "May I bring my dog?", "When do you close?"):
            prompt = await explained(client, prompt=f"{RULES} {question}", max_tokens=20, ignore_eos=True)
            assert "rewritten_last_turn" not in codes(prompt)
        assert prompt["reason"] == "differs" and prompt["first_difference"]["here"]["text"] == "close?"


async def test_an_answer_sent_back_as_it_came_hits():
    async with serving() as client:
        await client.complete(prompt=RULES, max_tokens=12, ignore_eos=True)
        answer = expected(tokens(RULES), 12, eos=False)
        prompt = await explained(client, prompt=[*tokens(RULES), *answer, *tokens("; thank you! And now?")])
        assert prompt["reason"] == "never_stored" and prompt["cached_tokens"] >= len(RULES) + 11


async def test_evicted_when_and_for_whom():
    async with serving() as client:
        await client.complete(prompt=RULES, max_tokens=1)
        client.now = 100.0
        greedy = await client.complete(prompt="x" * 290, max_tokens=4, ignore_eos=True)
        client.now = 107.5
        prompt = await explained(client, prompt=RULES)
        assert prompt["reason"] == "evicted" and codes(prompt) == ["pool_too_small"]
        assert prompt["evicted"]["seconds_ago"] == 7.5 and prompt["evicted"]["by"] == greedy["id"]
        assert prompt["cached_tokens"] + prompt["evicted"]["tokens"] == len(RULES)


async def test_evicted_for_somebody_elses_request():
    async with serving() as client:
        await client.complete(prompt=RULES, max_tokens=1)
        await client.complete(prompt="x" * 290, max_tokens=4, ignore_eos=True, cache_salt="another")
        prompt = await explained(client, prompt=RULES)
        assert prompt["reason"] == "evicted" and prompt["evicted"]["by"] is None


async def test_forgotten_by_a_reset():
    async with serving() as client:
        await client.complete(prompt=RULES, max_tokens=1)
        await client.call("POST", "/reset_prefix_cache")
        prompt = await explained(client, prompt=RULES)
        assert prompt["reason"] == "reset" and prompt["evicted"]["tokens"] == len(RULES)


async def test_another_salt():
    async with serving() as client:
        await client.complete(prompt=RULES, max_tokens=1)
        prompt = await explained(client, prompt=RULES, cache_salt="mine")
        assert prompt["reason"] == "other_namespace"
        assert prompt["other_namespace"] == {"part": "salt", "tokens": len(RULES) - len(RULES) % 4}


async def test_what_is_stored_under_a_salt_is_nobody_elses_business():
    async with serving() as client:
        secret = await client.complete(prompt=RULES, max_tokens=1, cache_salt="theirs")
        for salt in ({}, {"cache_salt": "mine"}):
            prompt = await explained(client, prompt=RULES, **salt)
            assert prompt["reason"] == "never_stored"
            await client.call("POST", "/reset_prefix_cache")
        for query in ("", "?cache_salt=mine"):
            await client.call("GET", f"/v1/requests/{secret['id']}/cache{query}", status=404)
        await client.call("GET", f"/v1/requests/{secret['id']}/cache?cache_salt=theirs")


@pytest.mark.parametrize(
    ("fields", "words", "advice"),
    [
        ({"cache_prompt": False}, "cache_prompt", ["allow_the_cache"]),
        ({"echo": True, "logprobs": 1}, "log-probabilities", []),
    ],
)
async def test_bypassed(fields: dict[str, Any], words: str, advice: list[str]):
    async with serving() as client:
        await client.complete(prompt=RULES, max_tokens=1)
        prompt = await explained(client, prompt=RULES, **fields)
        assert prompt["reason"] == "bypassed" and words in prompt["explanation"] and codes(prompt) == advice


async def test_nothing_is_shared_here():
    async with serving(index="none") as client:
        prompt = await explained(client, prompt=RULES)
        assert prompt["reason"] == "bypassed" and "shares no prefixes" in prompt["explanation"]


async def test_several_prompts_and_requests_that_nobody_knows():
    async with serving() as client:
        await client.complete(prompt=RULES, max_tokens=1)
        answer = await client.complete(prompt=[RULES, "Something else"], max_tokens=1, explain_cache=True)
        assert [p["reason"] for p in answer["explain_cache"]["prompts"]] == ["complete", "never_stored"]
        error = await client.call("GET", "/v1/requests/cmpl-nobody/cache", status=404)
        assert error["error"]["code"] == "request_not_found"
        answer = await client.complete(prompt=RULES, max_tokens=1)
        assert "explain_cache" not in answer


async def test_chats_and_streams():
    async with serving() as client:
        messages = [{"role": "user", "content": RULES}]
        answer = await client.chat(messages=messages, max_tokens=1, explain_cache=True)
        assert answer["explain_cache"]["prompts"][0]["reason"] == "never_stored"
        for path, body in (("chat/completions", {"messages": messages}), ("completions", {"prompt": RULES})):
            body |= {"stream": True, "explain_cache": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
            response = await client.http.post(f"/v1/{path}", json=body)
            *_, usage, last, done = events(response.text)
            assert done == "[DONE]" and usage["usage"]["completion_tokens"] == 2
            assert last["choices"] == [] and last["explain_cache"]["prompts"][0]["reason"] in (
                "complete",
                "never_stored",
            )
