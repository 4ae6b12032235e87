"""A server that ends, in whatever way, and one that begins again on the same disk cache."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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


def test_chats_go_on_after_a_restart(
    start_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3, D4: two chats on one system prompt; after SIGTERM, in a process that hashes otherwise, each next turn is
    cached to 90 %, with the right text."""
    options = (*OPTIONS, "--disk-cache", str(tmp_path / "pages"))
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    server = start_server(*options)
    chats = [Chat(question) for question in QUESTIONS[:2]]
    for chat in chats:
        chat.turn(server, "Thank you. And tomorrow?")
    assert server.stop() == 0
    monkeypatch.setenv("PYTHONHASHSEED", "2")
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
    """I3, D2: SIGKILL while the pages of a new prompt are written; what had been written is used, the text is right."""
    options = (*OPTIONS, "--disk-cache", str(tmp_path / "pages"))
    server = start_server(*options)
    chats = [Chat(question) for question in QUESTIONS]
    for chat in chats:
        chat.turn(server, "Thank you. And tomorrow?")
    for number in range(3):
        before = server.wait_until(lambda m: m['pagetrie:tier_queued_bytes{tier="disk"}'] == 0)
        stranger = Chat(QUESTIONS[0])
        stranger.messages[0]["content"] = f"House number {number} has other rules. {RULES * 3}"
        with server.openai.chat.completions.create(
            model=server.model,
            messages=stranger.messages,  # type: ignore[arg-type]
            max_tokens=400,
            stream=True,
        ) as stream:
            next(iter(stream))  # its prompt has just been computed
            stored = server.metrics()['pagetrie:tier_stored_pages_total{tier="disk"}']
            server.process.kill()
        assert server.process.wait() == -9
        server = start_server(*options)
        for chat in chats:
            answer = chat.ask(server)
            assert shares(answer)[0] >= 0.9
            assert text(answer) == text(chat.ask(server, cache_prompt=False))
        assert text(stranger.ask(server)) == text(stranger.ask(server, cache_prompt=False))
        assert stored >= before['pagetrie:tier_stored_pages_total{tier="disk"}']


@pytest.mark.slow
def test_a_process_killed_fifty_times(tmp_path: Path) -> None:
    """D2, I3: at random words of what it does, half-written pages among them: every start works, no text is wrong."""
    command = [sys.executable, "-m", "tests.e2e.killing", str(tmp_path), "50"]
    heard = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert heard["kills"] + heard.get("end", 0) == 51, "one of them died of itself"
    assert heard["kills"] >= 40 and heard.get("wrong", 0) == 0
    assert heard["torn"] > 200 and heard["hit"] > 60


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flip", "truncate", "other secret", "chmod", "empty"])
def test_damaged_files(start_server: Callable[..., Server], tmp_path: Path, damage: str) -> None:
    """D1, D2, D4, I2, H2: between two servers, or ("chmod", "empty") under one that has looked its pages up already: a
    miss or the right text, counted, never a start that fails and never wrong words."""
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
    elif damage == "empty":
        os.truncate(segment, 0)
    answer = chat.ask(server)
    assert text(answer) == before
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    full = answer["usage"]["prompt_tokens"] - 17
    if damage in ("flip", "truncate"):
        assert 0 < cached < full
    else:
        assert (cached >= full) if damage == "chmod" else (cached == 0)
    after = server.idle()
    failed = damage in ("flip", "empty")  # a file that is cut before the start is known to be
    assert after['pagetrie:tier_failed_pages_total{tier="disk"}'] == after["pagetrie:tier_failed_loads_total"] == failed
    again = chat.ask(server)
    assert text(again) == before and shares(again)[0] >= 0.9


@pytest.mark.slow
def test_a_disk_that_takes_no_more(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """D3: writes fail under a server that runs; it says so, and answers go on."""
    server = start_server(*OPTIONS, "--disk-cache", str(tmp_path / "pages"))
    first, second = Chat(QUESTIONS[0]), Chat(QUESTIONS[1])
    second.messages[0]["content"] = "These are the rules of the house next door. " + RULES
    first.ask(server)
    server.wait_until(lambda m: m['pagetrie:tier_queued_bytes{tier="disk"}'] == 0)
    (segment,) = (tmp_path / "pages").glob("segment-*")
    size = segment.stat().st_size
    # No file of the server's may grow beyond this: the next page is torn, and the one after it isn't begun.
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size + 1000, size + 1000))
    answer = second.ask(server)
    assert text(answer) == text(second.ask(server, cache_prompt=False))
    after = server.wait_until(lambda m: m['pagetrie:tier_healthy{tier="disk"}'] == 0)
    assert after['pagetrie:tier_refused_pages_total{tier="disk"}'] > 0
    assert sum("the disk cache stores nothing more" in line for line in server.log) == 1
    assert segment.stat().st_size == size
    server.reset()
    for chat in (first, second):
        assert text(chat.ask(server)) == text(chat.ask(server, cache_prompt=False))
    server.idle()


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


@pytest.mark.slow
def test_a_store_that_freezes_and_thaws(start_server: Callable[..., Server], valkey: Valkey) -> None:
    """D7: it answers nothing while connections stay open; answers go on without it, and later it is used as before."""
    options = (*OPTIONS, "--store", valkey.url, "--store-secret", "shared by these two servers")
    one, two = start_server(*options), start_server(*options)
    chats = [Chat(QUESTIONS[number]) for number in range(2)]
    chats[1].messages[0]["content"] = "These are the rules of the house next door. " + RULES
    answers = [chat.ask(one) for chat in chats]
    pages = sum(answer["usage"]["prompt_tokens"] // 16 for answer in answers)
    one.wait_until(lambda m: m['pagetrie:tier_stored_pages_total{tier="store"}'] >= pages)
    with two.openai.completions.create(
        model=two.model, prompt="One, two,", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        chunks, meanwhile = iter(stream), 0
        next(chunks)
        valkey.freeze()
        with ThreadPoolExecutor(1) as other:
            asked = other.submit(chats[0].ask, two)
            while not asked.done():
                next(chunks)
                meanwhile += 1
        answer = asked.result()
    assert text(answer) == text(answers[0]) and shares(answer)[1]["store"] == 0
    assert meanwhile > 0
    two.wait_until(lambda m: m['pagetrie:tier_healthy{tier="store"}'] == 0)
    valkey.thaw()
    for number in range(1000):
        if two.metrics()['pagetrie:tier_healthy{tier="store"}'] == 1:
            break
        two.complete(f"{number} green bottles are standing on the wall of the house by the sea.", max_tokens=1)
    answer = chats[1].ask(two)
    assert text(answer) == text(answers[1]) and shares(answer)[1]["store"] > 0
    two.idle()
