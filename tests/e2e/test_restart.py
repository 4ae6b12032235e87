"""A server that ends, in whatever way, and one that begins again on the same disk cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Server
from tests.kv.tiers.servers import Valkey

RULES = (
    "You are the night clerk of a small hotel by the sea. Guests write to you at any hour. You answer in one short "
    "sentence, you never promise a room that isn't free, and you always mention that breakfast is served until ten. "
) * 6
QUESTIONS = ("Is there a room for two?", "My key doesn't open the door.", "When does the last ferry leave?")


class Chat:
    """A conversation that goes on over several servers."""

    def __init__(self, question: str) -> None:
        self.messages: list[dict[str, str]] = [
            {"role": "system", "content": RULES},
            {"role": "user", "content": question},
        ]

    def ask(self, server: Server, **fields: object) -> dict[str, Any]:
        body = {"model": server.model, "messages": self.messages, "max_tokens": 24, "temperature": 0, **fields}
        answer: dict[str, Any] = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
        return answer

    def turn(self, server: Server, following: str) -> dict[str, Any]:
        answer = self.ask(server)
        self.messages += [answer["choices"][0]["message"] | {}, {"role": "user", "content": following}]
        self.messages[-2].pop("refusal", None)
        return answer


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def shares(answer: dict[str, Any]) -> tuple[float, dict[str, int]]:
    usage = answer["usage"]
    details = usage["prompt_tokens_details"]
    assert sum(details["pagetrie"].values()) == details["cached_tokens"] <= usage["prompt_tokens"]
    return details["cached_tokens"] / usage["prompt_tokens"], details["pagetrie"]


OPTIONS = ("--num-pages", "200", "--max-model-len", "2048")


def test_chats_go_on_after_a_restart(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """I3, D4: three chats on one system prompt; after SIGTERM each next turn is cached to 90 %, with the right text."""
    options = (*OPTIONS, "--disk-cache", str(tmp_path / "pages"))
    server = start_server(*options)
    chats = [Chat(question) for question in QUESTIONS]
    for chat in chats:
        chat.turn(server, "Thank you. And tomorrow?")
    assert server.stop() == 0
    server = start_server(*options)
    for chat in chats:
        answer = chat.ask(server)
        share, tiers = shares(answer)
        assert share >= 0.9
        assert tiers["disk"] + tiers["pool"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert text(answer) == text(chat.ask(server, cache_prompt=False))
    first, *_ = (shares(chat.ask(server))[1] for chat in chats)
    assert first["disk"] == 0  # in the pool by now


@pytest.mark.slow
def test_a_killed_server_begins_again(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """I3, D2: SIGKILL in the middle of work; what had reached the disk is used, and the text is right."""
    options = (*OPTIONS, "--disk-cache", str(tmp_path / "pages"))
    chat = Chat(QUESTIONS[0])
    right = None
    for _ in range(3):
        server = start_server(*options)
        answer = chat.ask(server)
        right = right or text(chat.ask(server, cache_prompt=False))
        assert text(answer) == right
        with server.openai.chat.completions.create(
            model=server.model,
            messages=Chat(QUESTIONS[1]).messages,
            max_tokens=400,
            stream=True,  # type: ignore[arg-type]
        ) as stream:
            for _, _chunk in zip(range(20), stream, strict=False):
                pass
            server.process.kill()
        server.process.wait()
        assert server.process.returncode == -9
    server = start_server(*options)
    answer = chat.ask(server)
    assert text(answer) == right
    assert shares(answer)[0] >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flip", "truncate", "chmod", "other secret"])
def test_damaged_files(start_server: Callable[..., Server], tmp_path: Path, damage: str) -> None:
    """D1, D2, H2: a miss or the right text, never a start that fails and never wrong words."""
    folder = tmp_path / "pages"
    options = (*OPTIONS, "--disk-cache", str(folder))
    server = start_server(*options)
    chat = Chat(QUESTIONS[0])
    before = text(chat.ask(server))
    assert server.stop() == 0
    (segment,) = folder.glob("segment-*")
    if damage == "flip":
        raw = bytearray(segment.read_bytes())
        raw[len(raw) // 2] ^= 1
        segment.write_bytes(raw)
    elif damage == "truncate":
        os.truncate(segment, segment.stat().st_size // 2)
    elif damage == "other secret":
        (folder / "secret").write_bytes(os.urandom(32))
    server = start_server(*options)
    if damage == "chmod":
        segment.chmod(0)
        shutil.move(segment, tmp_path / "gone")
    answer = chat.ask(server)
    assert text(answer) == before
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    full = answer["usage"]["prompt_tokens"] - 17
    assert {"flip": 0 < cached < full, "truncate": 0 < cached < full, "chmod": cached > 0, "other secret": cached == 0}[
        damage
    ]
    assert text(chat.ask(server)) == before


@pytest.mark.slow
def test_one_folder_serves_one_server(start_server: Callable[..., Server], tmp_path: Path) -> None:
    options = (*OPTIONS, "--disk-cache", str(tmp_path / "pages"))
    start_server(*options)
    with pytest.raises(AssertionError, match="in use by another process"):
        start_server(*options)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    server = Valkey(tmp_path)
    yield server
    server.kill()


@pytest.mark.slow
def test_another_replica_finds_the_prefix(start_server: Callable[..., Server], valkey: Valkey) -> None:
    """Two processes, one store: what the first computed, the second serves; the store dies, and answers go on."""
    options = (*OPTIONS, "--store", valkey.url, "--store-secret", "shared by these two servers")
    one, two = start_server(*options), start_server(*options)
    chat, other = Chat(QUESTIONS[0]), Chat(QUESTIONS[1])
    other.messages[0]["content"] = "These are the rules of the house next door. " + RULES
    answers = [asked.ask(one) for asked in (chat, other)]
    pages = sum(answer["usage"]["prompt_tokens"] // 16 for answer in answers)
    one.wait_until(lambda m: m['pagetrie:tier_stored_pages_total{tier="store"}'] >= pages)
    answer = chat.ask(two)
    share, tiers = shares(answer)
    assert text(answer) == text(answers[0])
    assert share >= 0.9 and tiers["store"] >= 0.9 * answer["usage"]["prompt_tokens"]
    valkey.freeze()  # the second's question for the other chat is on its way when the store dies
    with two.openai.chat.completions.create(
        model=two.model,
        messages=other.messages,  # type: ignore[arg-type]
        max_tokens=24,
        temperature=0,
        stream=True,
    ) as stream:
        chunks = iter(stream)
        pieces = [next(chunks)]
        valkey.kill()
        pieces += chunks
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert streamed == text(answers[1])
    for server in (one, two):
        fresh = Chat(QUESTIONS[2])
        fresh.messages[0]["content"] = "Another house, other rules. " + RULES
        assert text(fresh.ask(server)) == text(fresh.ask(server, cache_prompt=False))
        server.wait_until(lambda m: m['pagetrie:tier_healthy{tier="store"}'] == 0)
        assert sum("the store" in line and "fails" in line for line in server.log) <= 1
