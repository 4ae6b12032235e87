"""What users of other servers suffered from their prefix caches, asked of this one over HTTP on the real model."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.budget import first
from tests.e2e.conftest import Server
from tests.e2e.exactness import NEAR_TIE, assert_same

TOPICS = (
    "bread", "rivers", "clocks", "violins", "glass", "owls", "salt", "bridges", "maps", "rain",
    "tea", "moss", "chess", "kites", "iron", "paper", "whales", "sand", "wool", "stars",
)  # fmt: skip
STORY = "The old lighthouse keeper walked down to the harbour every morning before the gulls woke. " * 4


def cached(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    count = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= count < usage["prompt_tokens"]
    return int(count)


def tokens(server: Server, text: str) -> list[int]:
    return server.http.post("/tokenize", json={"prompt": text}).json()["tokens"]  # type: ignore[no-any-return]


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_seats_are_few_and_unrelated_chats_never_mix(narrow: Server) -> None:
    """A1: each answer is its solo answer, and cached_tokens is the true common prefix."""
    prompts = [f"{topic} are what this long note is about, and {topic} only. " * 3 for topic in TOPICS[:12]]
    ask = {"max_tokens": 8, "logprobs": 2}
    alone = [narrow.complete(prompt, cache_prompt=False, **ask)["choices"][0] for prompt in prompts]
    with ThreadPoolExecutor(6) as users:
        together = list(users.map(lambda prompt: narrow.complete(prompt, **ask), prompts))
    for solo, answer in zip(alone, together, strict=True):
        assert_same(solo, answer["choices"][0])
    narrow.reset()
    seen: list[list[int]] = []
    for prompt in prompts[:6]:
        ids = tokens(narrow, prompt)
        answer = narrow.complete(ids, max_tokens=1)
        assert cached(answer) == max((common(ids, other) for other in seen), default=0)
        seen.append(ids)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_whole_prompts_again(big: Server, length: int) -> None:
    """A8: asked again, all but one token is cached, and a third time as well."""
    big.reset()
    ids = tokens(big, STORY)[:length]
    answers = [big.complete(ids, max_tokens=4, logprobs=2) for _ in range(3)]
    assert [cached(answer) for answer in answers] == [0, length - 1, length - 1]
    for answer in answers[1:]:
        assert_same(answers[0]["choices"][0], answer["choices"][0])


@pytest.mark.parametrize("numbers", first(1, [range(0, 50, 3), range(50)]))
def test_hits_and_misses_agree_to_rounding(big: Server, numbers: range) -> None:
    """A9: fifty prompts cold and hit; the first token's distribution is the same within a small bound."""
    big.reset()
    for number in numbers:
        prompt = f"{STORY[: 20 + 7 * number]} Number {number} says:"
        cold = big.complete(prompt, max_tokens=2, logprobs=20, cache_prompt=False)
        server_first = big.complete(prompt, max_tokens=2, logprobs=20)
        hit = big.complete(prompt, max_tokens=2, logprobs=20)
        assert cached(cold) == 0
        assert cached(hit) == hit["usage"]["prompt_tokens"] - 1
        for answer in (server_first, hit):
            assert_same(cold["choices"][0], answer["choices"][0])
            first, again = (a["choices"][0]["logprobs"]["top_logprobs"][0] for a in (cold, answer))
            shared = first.keys() & again.keys()
            assert len(shared) >= 18
            assert max(abs(first[token] - again[token]) for token in shared) < NEAR_TIE


def test_bypassing_the_cache_is_repeatable_to_the_byte(big: Server) -> None:
    """A9: with the cache bypassed two solo runs are equal."""
    runs = [big.complete(STORY, max_tokens=24, logprobs=5, cache_prompt=False)["choices"] for _ in range(2)]
    assert runs[0] == runs[1]


def test_echoed_logprobs_do_not_hang_on_what_was_asked_before(big: Server) -> None:
    """A10: cold, warm and after other prompts: equal lists, one entry per prompt token, the first null."""
    big.reset()
    lists = []
    for prompt in (STORY, STORY, "Something else entirely.", STORY):
        answer = big.complete(prompt, max_tokens=1, echo=True, logprobs=3)
        logprobs = answer["choices"][0]["logprobs"]
        count = answer["usage"]["prompt_tokens"]
        assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"]) == count + 1
        assert logprobs["token_logprobs"][0] is None
        assert "".join(logprobs["tokens"][:count]) == prompt
        lists.append(logprobs["token_logprobs"][1:count])
    assert lists[0] == lists[1] == lists[3]


def test_reset_while_a_request_runs(big: Server) -> None:
    """A11: it says what it did, and nothing stored before it is hit after it."""
    big.reset()
    big.complete(STORY, max_tokens=1)
    with big.openai.completions.create(
        model=big.model, prompt=STORY + "Then", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        report = big.http.post("/reset_prefix_cache").json()
        assert report["busy_pages"] > 0
        again = big.complete(STORY, max_tokens=1)
        assert cached(again) == 0
        for _ in stream:
            pass
    assert cached(big.complete(STORY + "Then", max_tokens=1)) >= len(tokens(big, STORY)) - 1


def test_salts_separate_and_equal_salts_share(big: Server) -> None:
    big.reset()
    hits = [
        cached(big.complete(STORY, max_tokens=1, **({"cache_salt": salt} if salt else {})))
        for salt in ("a", "b", "", "a", "b", "")
    ]
    length = len(tokens(big, STORY))
    assert hits == [0, 0, 0, length - 1, length - 1, length - 1]


def test_next_turn_hits_the_turn_before(big: Server) -> None:
    """I6: turn 2 is turn 1, its reply and a question: all of turn 1 but the template's tail is cached."""
    big.reset()
    chat = [{"role": "system", "content": STORY}, {"role": "user", "content": "Who walks to the harbour?"}]
    first = big.openai.chat.completions.create(model=big.model, messages=chat, max_tokens=30, temperature=0)  # type: ignore[arg-type]
    reply = first.choices[0].message.content
    chat += [{"role": "assistant", "content": reply or ""}, {"role": "user", "content": "And why?"}]
    second = big.openai.chat.completions.create(model=big.model, messages=chat, max_tokens=5, temperature=0)  # type: ignore[arg-type]
    assert first.usage and second.usage and second.usage.prompt_tokens_details
    hit = second.usage.prompt_tokens_details.cached_tokens
    assert hit is not None
    assert hit >= first.usage.prompt_tokens + first.usage.completion_tokens - 2


def test_fifty_users_hold_their_prefix_once(big: Server) -> None:
    """Fifty users on one prefix: its pages exist once, each user's own only from the divergence on."""
    big.reset()
    prefix = tokens(big, STORY * 2)
    big.complete(prefix, max_tokens=1)
    before = big.idle()
    peak = 0.0

    def ask(user: int) -> dict[str, Any]:
        return big.complete([*prefix, *tokens(big, f" User {user} asks about {TOPICS[user % 20]}:")], max_tokens=8)

    with ThreadPoolExecutor(50) as users:
        answers = [users.submit(ask, user) for user in range(50)]
        while not all(answer.done() for answer in answers):
            peak = max(peak, big.metrics()['pagetrie:pages{state="active"}'])
    trunk = len(prefix) // 16
    own = max(-(-(a.result()["usage"]["total_tokens"]) // 16) - trunk for a in answers)
    assert peak > trunk + 50
    assert peak <= trunk + 50 * own
    assert all(cached(answer.result()) >= len(prefix) for answer in answers)
    after = big.idle()
    computed = 'vllm:prompt_tokens_by_source_total{source="local_compute"}'
    assert after[computed] - before[computed] == sum(
        a.result()["usage"]["prompt_tokens"] - cached(a.result()) for a in answers
    )


def burst(server: Server) -> tuple[list[int], list[list[int]]]:
    """A trunk of 400 tokens, and tails for four users."""
    return tokens(server, STORY * 6)[:400], [
        tokens(server, f" Now tell me about {TOPICS[user]} in one line, please, and be quick about it.")
        for user in range(4)
    ]


def test_a_burst_on_a_cold_trunk_computes_it_once(narrow: Server) -> None:
    """I4: four requests at once on one trunk compute it once and hold it once."""
    narrow.reset()
    trunk, tails = burst(narrow)
    before, peak = narrow.idle(), 0.0
    gate = threading.Barrier(4)

    def ask(user: int) -> dict[str, Any]:
        gate.wait()
        return narrow.complete([*trunk, *tails[user]], max_tokens=4, logprobs=2)

    with ThreadPoolExecutor(4) as users:
        answers = [users.submit(ask, user) for user in range(4)]
        while not all(answer.done() for answer in answers):
            peak = max(peak, narrow.metrics()['pagetrie:pages{state="active"}'])
    prefilled = narrow.idle()["pagetrie:prefill_tokens_total"] - before["pagetrie:prefill_tokens_total"]
    assert prefilled <= 400 + sum(map(len, tails)) + 4 * 16
    assert 400 // 16 < peak <= 400 // 16 + 4 * 3
    for user in (1, 3):
        solo = narrow.complete([*trunk, *tails[user]], max_tokens=4, logprobs=2, cache_prompt=False)
        assert_same(solo["choices"][0], answers[user].result()["choices"][0])


@pytest.mark.slow
def test_the_first_of_a_burst_leaves(start_server: Callable[..., Server]) -> None:
    """I4: whoever computes the trunk is cancelled half-way; the others, who wait for it, go on from there."""
    server = start_server("--num-pages", "120", "--max-num-batched-tokens", "64")
    trunk, tails = burst(server)
    before = server.metrics()["pagetrie:prefill_tokens_total"]
    body = json.dumps({"model": server.model, "prompt": [*trunk, *tails[3]], "max_tokens": 4})
    host = server.url.removeprefix("http://")

    def computed(count: int) -> None:
        server.wait_until(lambda values: values["pagetrie:prefill_tokens_total"] - before >= count)

    def ask(user: int) -> dict[str, Any]:
        return server.complete([*trunk, *tails[user]], max_tokens=4, logprobs=2)

    with socket.create_connection((host.split(":")[0], int(host.split(":")[1])), 60) as leader:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        leader.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        computed(64)
        with ThreadPoolExecutor(3) as users:
            answers = [users.submit(ask, user) for user in range(3)]
            computed(192)
            leader.close()
    after = server.idle()
    assert after['vllm:request_success_total{finished_reason="abort"}'] == 1
    assert after["pagetrie:prefill_tokens_total"] - before <= 400 + sum(map(len, tails)) + 4 * 16
    for user in range(3):
        solo = server.complete([*trunk, *tails[user]], max_tokens=4, logprobs=2, cache_prompt=False)
        assert_same(solo["choices"][0], answers[user].result()["choices"][0])
