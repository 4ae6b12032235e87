"""The server over the bundled model, through the ``openai`` client and plain HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from pagetrie.assembly import build
from pagetrie.engine.loop import EngineLoop
from pagetrie.server.app import create_app
from pagetrie.server.metrics import Metrics
from pagetrie.server.serve import HttpServer
from pagetrie.settings import Settings

MODEL = "smol"
CONTEXT = 256
SYSTEM = "You are a careful assistant who answers in few words. " * 5


@pytest.fixture(scope="module")
def url(bundled_model: Path) -> Iterator[str]:
    """The base URL of a server with 48 pages of 16 tokens."""
    made: list[Metrics] = []

    def observe(name: str, max_model_len: int) -> Metrics:
        made.append(Metrics(name, max_model_len))
        return made[0]

    settings = Settings(
        model=bundled_model, served_model_name=MODEL, num_pages=48, max_model_len=CONTEXT, max_num_seqs=8
    )
    parts = build(settings, make_observer=observe)
    app = create_app(
        loop=EngineLoop(parts.engine),
        tokenizer=parts.tokenizer,
        chat_template=parts.chat_template,
        model_name=parts.name,
        max_model_len=parts.max_model_len,
        metrics=made[0],
    )
    ready = threading.Event()
    server = HttpServer(app, port=0, shutdown_timeout=0, on_ready=lambda _: ready.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    assert ready.wait(30)
    yield server.url
    server.stop()
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    httpx.post(url + "/reset_prefix_cache").raise_for_status()
    with OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as made:
        yield made


def metric(url: str, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(httpx.get(url + "/metrics").text)
    samples = [s for f in families for s in f.samples if s.name == name and labels.items() <= s.labels.items()]
    [sample] = samples
    return sample.value


def wait_until_idle(url: str) -> None:
    """Until no page is in use; the test's own time limit ends a wait in vain."""
    while metric(url, "pagetrie:pages", state="active") or metric(url, "vllm:num_requests_running"):
        pass


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def test_two_users_share_a_system_prompt(client, url):
    ask = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    first = client.chat.completions.create(messages=chat("What is the capital of France?"), **ask)
    second = client.chat.completions.create(messages=chat("What colour is the sky?"), **ask)
    again = client.chat.completions.create(messages=chat("What is the capital of France?"), **ask)
    assert "Paris" in first.choices[0].message.content
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    shared = second.usage.prompt_tokens_details.cached_tokens
    assert 50 < shared < second.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert again.choices[0].message.content == first.choices[0].message.content
    assert metric(url, "vllm:prefix_cache_hits_total") >= shared
    assert metric(url, "vllm:request_success_total", finished_reason="length") >= 1


def test_salt_and_bypass_keep_a_prompt_to_itself(client):
    def cached(**extra) -> int:
        answer = client.chat.completions.create(
            model=MODEL, messages=chat("Hi"), max_tokens=1, temperature=0, extra_body=extra
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached(cache_prompt=False) == 0
    assert cached() == 0
    assert cached() > 0
    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") > 0
    assert cached(cache_salt="b") == 0
    assert cached(cache_prompt=False) == 0


def test_a_stream_is_the_whole_answer_in_pieces(client):
    ask = {"model": MODEL, "messages": chat("Count to five."), "temperature": 0.8, "seed": 5, "n": 3, "max_tokens": 12}
    whole = client.chat.completions.create(**ask)
    texts, usage, pieces = ["", "", ""], None, 0
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            pieces += bool(choice.delta.content)
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1 and pieces > 6
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_logprobs_describe_the_text(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=chat("Say hello."), temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    [choice] = answer.choices
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().startswith(choice.message.content)
    for entry in entries:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0
        assert len(entry.top_logprobs) == 3


def test_stop_strings_end_the_text_and_stay_out_of_it(client):
    ask = {"model": MODEL, "prompt": "One, two, three, four,", "temperature": 0, "max_tokens": 12}
    free = client.completions.create(**ask).choices[0].text
    stop = free[5:9]
    expected = free[: free.index(stop)]
    held = client.completions.create(**ask, stop=stop).choices[0]
    assert (held.text, held.finish_reason) == (expected, "stop")
    streamed = client.completions.create(**ask, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected


def test_echoed_logprobs_do_not_depend_on_the_cache(client, url):
    ask = {"model": MODEL, "prompt": "The quick brown fox jumps over the lazy dog.", "max_tokens": 0, "echo": True}
    tokens = httpx.post(url + "/tokenize", json={"prompt": ask["prompt"]}).json()
    cold = client.completions.create(**ask, logprobs=2).choices[0]
    client.completions.create(model=MODEL, prompt="Something else entirely.", max_tokens=2)
    warm = client.completions.create(**ask, logprobs=2).choices[0]
    assert cold.text == ask["prompt"] == "".join(cold.logprobs.tokens)
    assert len(cold.logprobs.tokens) == tokens["count"]
    assert cold.logprobs.token_logprobs[0] is None and all(p <= 0 for p in cold.logprobs.token_logprobs[1:])
    places = zip(cold.logprobs.text_offset, cold.logprobs.tokens, strict=True)
    assert all(cold.text[offset:].startswith(token) for offset, token in places)
    assert warm.logprobs.tokens == cold.logprobs.tokens
    assert warm.logprobs.token_logprobs[1:] == pytest.approx(cold.logprobs.token_logprobs[1:], abs=1e-3)


def test_detokenize_undoes_tokenize(url):
    text = "Grüße, 世界! <|im_end|> 🦊"
    tokens = httpx.post(url + "/tokenize", json={"prompt": text}).json()
    assert tokens["max_model_len"] == CONTEXT
    assert httpx.post(url + "/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": text}


@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_fit_is_refused_and_what_just_fits_ends_by_length(client, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[5] * (CONTEXT + 1), stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert str(CONTEXT) in caught.value.message and str(CONTEXT + 1) in caught.value.message
    answer = client.completions.create(
        model=MODEL, prompt=[5] * (CONTEXT - 1), max_tokens=50, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 1


def test_cancelled_streams_give_their_pages_back(client, url):
    for _ in range(3):
        stream = client.chat.completions.create(
            model=MODEL, messages=chat("Tell a long story."), n=4, max_tokens=150, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        stream.close()
    wait_until_idle(url)
    assert metric(url, "vllm:request_success_total", finished_reason="abort") >= 3
    assert sum(metric(url, "pagetrie:pages", state=state) for state in ("free", "cached")) == 48


def test_a_client_that_gives_up_waiting_gives_its_pages_back(url):
    body = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url + "/v1/completions", json=body, timeout=0.3)
    wait_until_idle(url)
    assert httpx.get(url + "/health").status_code == 200


def test_a_reset_says_what_it_freed(client, url):
    client.completions.create(
        model=MODEL, prompt="A prompt of some length, for a page or two at least, or three.", max_tokens=1
    )
    report = httpx.post(url + "/reset_prefix_cache").json()
    assert report["freed_pages"] > 0 and report["busy_pages"] == 0
    assert metric(url, "pagetrie:pages", state="cached") == 0
