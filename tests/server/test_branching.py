"""Beams, best_of and warm-up over HTTP."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pagetrie.engine.runner import TokenLogprob
from pagetrie.engine.tenant import LOCAL, Owner
from pagetrie.errors import ConfigError, InvalidRequestError
from pagetrie.server.collect import Choice, likeliest
from pagetrie.server.warm import WarmPrompt, read_warm_file
from tests.engine.test_beams import searched
from tests.server.double import BOS, ByteTokenizer, EngineDouble, PlainTemplate
from tests.server.test_contexts import RULES, serving, tokens, written

SERVER = Owner(server=True)

pytestmark = pytest.mark.anyio


async def test_max_tokens_0_computes_and_stores_a_prompt() -> None:
    async with serving() as client:
        answer = await client.complete(prompt=RULES, max_tokens=0)
        assert answer["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (32, 0)
        again = await client.complete(prompt=RULES + "x", max_tokens=1)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        chat = {"messages": [{"role": "user", "content": RULES}]}
        assert (await client.chat(**chat, max_completion_tokens=0))["choices"][0]["message"]["content"] == ""
        assert client.world.idle_pages() == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"beam_width": 4, "n": 2},
        {"use_beam_search": True, "n": 2, "best_of": 4},
        {"beam_width": 4, "n": 2, "logprobs": 1},
    ],
)
async def test_beams_over_http(fields: dict[str, object]) -> None:
    async with serving() as client:
        fields = {"max_tokens": 7, "length_penalty": 0.5, "early_stopping": "never", **fields}
        answer = await client.complete(prompt=RULES, **fields)
        best = searched(tokens(RULES), 2, width=4, max_tokens=7, length_penalty=0.5, early_stopping="never")
        assert [choice["text"] for choice in answer["choices"]] == [written(beam.tokens) for beam in best]
        assert answer["usage"]["completion_tokens"] == sum(len(beam.tokens) for beam in best)
        if "logprobs" in fields:
            for choice, beam in zip(answer["choices"], best, strict=True):
                assert choice["logprobs"]["token_logprobs"] == [entry.logprob for entry in beam.logprobs]


async def test_vllms_switch_keeps_as_many_beams_as_choices() -> None:
    async with serving() as client:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "use_beam_search": True, "n": 3}
        answer = await client.chat(**chat)
        best = searched(tokens("user: Hi\nassistant: "), 3, width=3, max_tokens=5)
        assert [choice["message"]["content"] for choice in answer["choices"]] == [written(b.tokens) for b in best]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 2, "stream": True}, "stream"),
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 9}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 2, "best_of": 3}, "best_of"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"beam_width": 2, "early_stopping": 1}, "early_stopping"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 200}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
    ],
)
async def test_what_makes_no_sense_is_refused(fields: dict[str, object], param: str) -> None:
    async with serving() as client:
        error = (await client.call("POST", "/v1/completions", 400, prompt="x", **fields))["error"]
        assert error["param"] == param


def choice(text: str, *logprobs: float) -> Choice:
    return Choice(text, [TokenLogprob(1, value) for value in logprobs], "stop")


def test_the_best_of_each_prompts_choices_by_mean_logprob() -> None:
    choices = [
        choice("a", -1.0, -1.0),
        choice("b", -0.5, -0.9, -1.0),
        choice("c"),
        choice("d", -9.0),
        choice("e", -2.0),
        choice("f", -2.0),
    ]
    assert [c.text for c in likeliest(choices, 3, 2)] == ["b", "a", "e", "f"]
    assert [c.text for c in likeliest(choices, 3, 1)] == ["b", "e"]
    assert likeliest(choices, 3, 3) == choices


async def test_best_of_draws_more_than_it_returns_and_counts_all(make_site) -> None:
    site = make_site(EngineDouble(texts=["one", "three", "seven"]))
    body = {"prompt": ["a", "b"], "n": 2, "best_of": 3}
    answer = (await site.post("/v1/completions", body)).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert all(c["logprobs"] is None for c in answer["choices"])
    assert site.engine.last.params.n == 3 and site.engine.last.params.logprobs == 0
    assert answer["usage"]["completion_tokens"] == 2 * (3 + 5 + 5)
    shown = (await site.post("/v1/completions", {**body, "logprobs": 1, "echo": True})).json()["choices"]
    assert len(shown) == 4 and all(c["logprobs"]["tokens"] for c in shown)
    assert [c["text"][0] for c in shown] == ["a", "a", "b", "b"]


async def test_warm_prompts_are_cached_and_pinned_before_the_first_request() -> None:
    warm = [
        WarmPrompt(1, tokens(RULES), SERVER, True, math.inf),
        WarmPrompt(2, tokens("for a while"), SERVER, True, 60.0),
        WarmPrompt(3, tokens("not pinned"), Owner(salt="alice", server=True), False, math.inf),
        WarmPrompt(5, tokens("far too much " * 10), SERVER, True, math.inf),
    ]
    async with serving(warm=warm, hold_limit=14) as client:
        assert client.world.cache.stats().pinned_pages == 8 + 3
        assert (await client.call("GET", "/v1/contexts"))["data"] == []
        for prompt, salt, cached in ((RULES, None, 31), ("not pinned", "alice", 9), ("not pinned", None, 0)):
            answer = await client.complete(prompt=prompt, cache_salt=salt, max_tokens=1)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        client.now = 60.0
        await client.complete(prompt="x", max_tokens=1)
        assert client.world.cache.stats().pinned_pages == 8


def test_a_warm_file_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "warm.jsonl"
    path.write_text(
        '{"prompt": "ab", "pin": true, "ttl": 5}\n\n'
        '{"messages": [{"role": "system", "content": "Be nice."}], "cache_salt": "s"}\n'
        '{"prompt": [1, 2, 3]}'
    )
    prompts = read_warm_file(path, ByteTokenizer(), PlainTemplate(), lambda request: None, {"": LOCAL})
    assert prompts == [
        WarmPrompt(1, [BOS, 97, 98], SERVER, True, 5),
        WarmPrompt(3, tokens("system: Be nice.\n"), Owner(salt="s", server=True), False, math.inf),
        WarmPrompt(4, [1, 2, 3], SERVER, False, math.inf),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 .* not valid JSON"),
        ('{"prompt": "a", "ttl": 3}', "line 2 .*'ttl' needs 'pin'"),
        ('{"prompt": "a", "text": "b"}', "line 2 .*Unknown parameter: 'text'"),
        ('{"prompt": "a", "messages": []}', "line 2 .*Exactly one of"),
        ('{"prompt": "too long"}', "line 2 .*never fits"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 2 .*no chat template"),
    ],
)
def test_a_bad_line_of_a_warm_file_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "warm.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)

    def validate(request: object) -> None:
        if len(request.prompt_ids) > 6:  # type: ignore[attr-defined]
            raise InvalidRequestError("never fits")

    with pytest.raises(ConfigError, match=words):
        read_warm_file(path, ByteTokenizer(), None, validate, {"": LOCAL})
    with pytest.raises(ConfigError, match="can't read the warm-up file"):
        read_warm_file(tmp_path / "none", ByteTokenizer(), None, validate, {})
