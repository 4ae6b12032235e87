"""A pool that is too small, and clients that leave: nothing is lost, nothing leaks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.budget import first
from tests.e2e.conftest import Server
from tests.e2e.test_prefix_cache import STORY, TOPICS, tokens


def test_what_can_never_fit_is_refused_and_the_rest_goes_on(small: Server) -> None:
    """C1: pool of 512 tokens; 600 are refused at once with both numbers, 20 are served."""
    ids = (tokens(small, STORY) * 20)[:600]
    with pytest.raises(openai.BadRequestError) as refused:
        small.openai.completions.create(model=small.model, prompt=ids, max_tokens=5)
    assert refused.value.code == "context_length_exceeded"
    assert "512" in str(refused.value)
    assert "600" in str(refused.value)
    answer = small.complete(ids[:20], max_tokens=4)
    assert answer["usage"]["completion_tokens"] == 4


def test_a_prompt_that_leaves_little_room_ends_with_length(small: Server) -> None:
    """C1, C2: prompt 500 with max_tokens 100 in 512 tokens: the text so far, finish_reason length."""
    ids = (tokens(small, STORY) * 20)[:500]
    answer = small.complete(ids, max_tokens=100, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["choices"][0]["text"]
    assert small.complete("Hello", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.fixture(scope="module")
def precise(start_lasting: Callable[..., Server]) -> Server:
    """A small pool, and kernels whose result for a token depends on nothing but its own sequence."""
    return start_lasting("--num-pages", "10", "--weights", "q8", "--max-model-len", "128")


@pytest.mark.parametrize("temperature", first(1, [0.8, 0.0]))
def test_short_of_pages_the_text_is_the_one_of_a_run_alone(precise: Server, temperature: float) -> None:
    """C5: preempted again and again; streams join to the final text; every token reaches the client once."""

    def ask(user: int) -> tuple[str, int, int]:
        body = {"ignore_eos": True, "top_k": 40}
        pieces, usage = [], None
        with precise.openai.completions.create(
            model=precise.model,
            prompt=f"A short note on {TOPICS[user]}, written by hand:",
            max_tokens=30,
            seed=user,
            temperature=temperature,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=body,
        ) as stream:
            for chunk in stream:
                pieces += [choice.text for choice in chunk.choices]
                usage = chunk.usage or usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return "".join(pieces), usage.completion_tokens, usage.prompt_tokens_details.cached_tokens or 0

    preemptions = [precise.metrics()["vllm:num_preemptions_total"]]
    answers = {}
    for together in (1, 8):
        precise.reset()
        with ThreadPoolExecutor(together) as users:
            answers[together] = list(users.map(ask, range(8)))
        preemptions.append(precise.idle()["vllm:num_preemptions_total"])
    assert preemptions[1] == preemptions[0] and preemptions[2] >= preemptions[1] + 3
    assert [text for text, _, _ in answers[1]] == [text for text, _, _ in answers[8]]
    assert all(count == 30 and hit < 16 for asked in answers.values() for _, count, hit in asked)


def test_streams_that_are_dropped_leave_nothing_behind(big: Server) -> None:
    """B1: n=4, dropped after the first chunk, again and again."""
    base = big.idle()
    for _ in range(10):
        with big.openai.completions.create(
            model=big.model, prompt=STORY, n=4, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
    after = big.idle()
    aborted = 'vllm:request_success_total{finished_reason="abort"}'
    assert after[aborted] - base[aborted] == 40
    assert after["vllm:generation_tokens_total"] - base["vllm:generation_tokens_total"] < 10 * 4 * 200


def test_a_client_that_leaves_without_streaming_stops_its_prefill(narrow: Server) -> None:
    """B7: stream=false, dropped in prefill: its pages are free within a chunk."""
    before = narrow.idle()["pagetrie:prefill_tokens_total"]
    ids = (tokens(narrow, STORY) * 60)[:4000]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{narrow.url}/v1/completions", json={"model": narrow.model, "prompt": ids}, timeout=0.5)
    assert narrow.idle()["pagetrie:prefill_tokens_total"] - before < 4000


def test_queued_requests_of_clients_that_left_never_run(narrow: Server) -> None:
    """B7: all four seats busy, five queued and dropped: none of the five runs a step."""
    base = narrow.idle()["vllm:prompt_tokens_total"]
    with narrow.openai.completions.create(
        model=narrow.model, prompt="Busy", n=4, max_tokens=150, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        chunks = iter(stream)
        next(chunks)

        def queue(user: int) -> None:
            body = {"model": narrow.model, "prompt": f"{TOPICS[user]} {STORY}", "max_tokens": 5}
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{narrow.url}/v1/completions", json=body, timeout=0.5)

        threads = [threading.Thread(target=queue, args=(user,)) for user in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for _ in chunks:
            pass
    done = narrow.idle()
    assert done["vllm:prompt_tokens_total"] - base == len(tokens(narrow, "Busy"))


def test_eight_streams_each_get_all_their_tokens_in_order(big: Server) -> None:
    """B9: concurrent streams equal their solo answers."""
    prompts = [f"{topic}: a list of facts." for topic in TOPICS[:8]]

    def ask(prompt: str) -> str:
        with big.openai.completions.create(
            model=big.model, prompt=prompt, max_tokens=20, temperature=0, stream=True, seed=1
        ) as stream:
            return "".join(chunk.choices[0].text for chunk in stream)

    def ask_whole(prompt: str) -> dict[str, Any]:
        return big.complete(prompt, max_tokens=20, logprobs=2)

    with ThreadPoolExecutor(8) as users:
        streamed = list(users.map(ask, prompts))
    with ThreadPoolExecutor(8) as users:
        whole = list(users.map(ask_whole, prompts))
    for text, answer in zip(streamed, whole, strict=True):
        choice = answer["choices"][0]
        gaps = [sorted(top.values())[-1] - sorted(top.values())[-2] for top in choice["logprobs"]["top_logprobs"]]
        if text != choice["text"]:
            first = next(i for i, gap in enumerate(gaps) if gap < 0.05)
            assert text.startswith("".join(choice["logprobs"]["tokens"][:first]))
        else:
            assert text == choice["text"]


def test_a_long_body_never_holds_up_the_others(big: Server) -> None:
    """G9: a big prompt is tokenised beside a stream and /health, then refused."""
    text = "All work and no play makes a dull server. " * 60_000  # 2.5 MB
    gaps: list[int] = []
    with big.openai.completions.create(
        model=big.model, prompt=STORY, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        chunks = iter(stream)
        next(chunks)
        with ThreadPoolExecutor(1) as other:
            refused = other.submit(big.http.post, "/v1/completions", json={"model": big.model, "prompt": text})
            while not refused.done():
                next(chunks)
                assert httpx.get(f"{big.url}/health").status_code == 200
                gaps.append(1)
    assert refused.result().status_code == 400
    assert refused.result().json()["error"]["code"] == "context_length_exceeded"
    # The stream and /health went on while the body was read and tokenised.
    assert len(gaps) >= 3
