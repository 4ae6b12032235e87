"""Tenants on the real model over HTTP: what one asked for shows to no other: by count, by id, on disk, by the clock."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagetrie.server import keys_file
from tests.e2e.conftest import Server

POLICY = "You are the assistant of a public library. Opening hours are from nine to six, on Sundays ten to two. " * 4
STORY = "The lighthouse keeper wrote down the weather every morning, and in the evening he read it again. " * 4
TRIALS = 200


class Keys:
    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, tenant: str, **options: Any) -> str:
        with keys_file.editing(self.path) as file:
            file.tenants.setdefault(tenant, keys_file.new_tenant())
            return keys_file.add_key(file, tenant, **options)[1]

    def remove(self, tenant: str) -> None:
        with keys_file.editing(self.path) as file:
            del file.tenants[tenant]
            file.keys = [key for key in file.keys if key.tenant != tenant]


class Site:
    """A server with keys for alice, mallory and an operator, and a public system prompt."""

    def __init__(self, folder: Path, start: Callable[..., Server], *options: str) -> None:
        self.keys = Keys(folder / "keys.json")
        self.alice, self.mallory = self.keys.add("alice"), self.keys.add("mallory")
        self.operator = self.keys.add("ops", admin=True)
        public = folder / "public.jsonl"
        public.write_text(json.dumps({"messages": [{"role": "system", "content": POLICY}]}) + "\n")
        self.start = lambda: start(
            "--api-keys", str(self.keys.path), "--public-prefix", str(public), "--num-pages", "500", *options
        )
        self.server = self.start()

    def call(self, key: str, method: str, path: str, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return self.server.http.request(method, path, json=body or None, headers=headers)

    def complete(self, key: str, prompt: object, **fields: Any) -> Any:
        response = self.call(
            key, "POST", "/v1/completions", **{"prompt": prompt, "temperature": 0, "max_tokens": 1, **fields}
        )
        response.raise_for_status()
        return response.json()

    def cached(self, key: str, prompt: object, **fields: Any) -> int:
        return int(self.complete(key, prompt, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"])

    def chat(self, key: str, *messages: tuple[str, str]) -> tuple[int, int]:
        """Prompt tokens and cached tokens."""
        body = {"messages": [{"role": role, "content": text} for role, text in messages], "max_tokens": 1}
        usage = self.call(key, "POST", "/v1/chat/completions", **body).json()["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def site(start_lasting: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("tenants"), start_lasting, "--no-disk-cache")


def test_h1_nobody_hits_anothers_prompt_whatever_salt_they_send(site: Site) -> None:
    assert site.cached(site.alice, STORY) == 0
    assert site.cached(site.mallory, STORY) == 0
    again = site.cached(site.alice, STORY)
    assert again > 50
    secret = keys_file.load(site.keys.path).tenants["alice"].secret
    assert site.cached(site.alice, STORY, cache_salt="mine") == 0
    for salt in ("mine", "alice", secret, site.alice, "alice\0mine"):
        assert site.cached(site.mallory, STORY, cache_salt=salt) == 0, salt
    assert site.cached(site.alice, STORY, cache_salt="mine") == again
    # A salt narrows: not even its own tenant gets in without it.
    assert site.cached(site.alice, STORY + "And", cache_salt="other") == 0


def test_all_hit_the_public_prefix_and_only_whole_pages_of_it(site: Site) -> None:
    ask = (("system", POLICY), ("user", "When do you open on Sundays? I would like to come at eleven."))
    total, first = site.chat(site.alice, *ask)
    assert 64 < first < total and first % 16 == 0
    assert site.chat(site.mallory, *ask) == (total, first)
    assert site.chat(site.alice, *ask) == (total, total - 1)
    (listed,) = site.call(site.operator, "GET", "/v1/admin/public_prefixes").json()["data"]
    assert listed["held_tokens"] == first
    for method, path in (("GET", "/v1/admin/public_prefixes"), ("DELETE", f"/v1/admin/public_prefixes/{listed['id']}")):
        assert site.call(site.mallory, method, path).status_code == 403


def test_an_operator_shares_and_withdraws_while_the_server_runs(site: Site) -> None:
    text = "A handbook that everybody may read. Its first rule is to water the plants on Mondays. " * 6
    made = site.call(site.operator, "POST", "/v1/admin/public_prefixes", prompt=text).json()
    assert made["held_tokens"] == made["shared_pages"] * 16 > 0
    assert site.cached(site.mallory, text + " What is the first rule?") == made["held_tokens"]
    assert site.cached(site.alice, text + " What is the first rule?") == made["held_tokens"]
    assert site.call(site.operator, "DELETE", f"/v1/admin/public_prefixes/{made['id']}").json()["deleted"]
    assert site.cached(site.mallory, text + " What is the first rule?") == 0


def test_contexts_and_requests_of_others_read_as_if_they_did_not_exist(site: Site) -> None:
    made = site.call(site.alice, "POST", "/v1/contexts", prompt=STORY).json()
    answer = site.complete(site.alice, STORY)
    for path, code in (
        (f"/v1/contexts/{made['id']}", "context_not_found"),
        (f"/v1/requests/{answer['id']}/cache", "request_not_found"),
    ):
        assert site.call(site.alice, "GET", path).status_code == 200
        theirs = site.call(site.mallory, "GET", path)
        none = site.call(site.mallory, "GET", path.replace(made["id"], "ctx-none").replace(answer["id"], "cmpl-none"))
        assert theirs.status_code == none.status_code == 404
        assert theirs.json()["error"]["code"] == none.json()["error"]["code"] == code
    used = site.call(site.mallory, "POST", "/v1/completions", context=made["id"], max_tokens=1)
    assert used.status_code == 404
    # By whatever verb, and with whatever salt: as for an id that nobody has.
    for path, body in (
        ("/v1/contexts/{}/fork", {"n": 2}),
        ("/v1/contexts/{}/append", {"prompt": "and so on"}),
        ("/v1/completions", {"context": "{}", "prompt": "x", "append": True, "max_tokens": 1}),
        ("/v1/chat/completions", {"context": "{}", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/v1/completions", {"context": "{}", "cache_salt": "alice", "max_tokens": 1}),
    ):
        answers = []
        for name in (made["id"], "ctx-none"):
            filled = {key: value.format(name) if key == "context" else value for key, value in body.items()}
            answer = site.call(site.mallory, "POST", path.format(name), **filled)
            answers.append((answer.status_code, answer.text.replace(name, "ID")))
        assert answers[0] == answers[1] and answers[0][0] == 404, path
    for salt in ("mine", "alice"):
        assert site.call(site.alice, "GET", f"/v1/contexts/{made['id']}?cache_salt={salt}").status_code == 404
    assert made["id"] not in site.call(site.alice, "GET", "/v1/contexts?cache_salt=mine").text
    assert site.call(site.mallory, "GET", "/v1/contexts").json()["data"] == []
    assert site.call(site.mallory, "DELETE", f"/v1/contexts/{made['id']}").status_code == 404
    assert site.call(site.alice, "DELETE", f"/v1/contexts/{made['id']}").status_code == 200


def test_an_explanation_knows_nothing_of_others(site: Site) -> None:
    prompt = "Nobody but Alice has ever asked for this particular sequence of quite ordinary words. " * 3
    site.complete(site.alice, prompt)
    told = site.complete(site.mallory, prompt, explain_cache=True)["explain_cache"]["prompts"][0]
    assert (told["reason"], told["cached_tokens"]) == ("never_stored", 0)


def test_a_revoked_key_is_refused_by_the_running_server(site: Site) -> None:
    key = site.keys.add("passing")
    assert site.cached(key, "Hello") == 0
    site.keys.remove("passing")
    assert site.call(key, "POST", "/v1/completions", prompt="Hello").status_code == 401


@pytest.mark.slow
def test_encrypted_pages_outlive_a_restart_but_not_their_tenant(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    pages = tmp_path / "pages"
    site = Site(tmp_path, start_server, "--disk-cache", str(pages), "--encrypt-cache")
    tokens = site.call(site.alice, "POST", "/tokenize", prompt=STORY).json()["tokens"]
    site.complete(site.alice, STORY)
    site.complete(site.mallory, STORY)
    assert site.server.stop() == 0
    files = b"".join(path.read_bytes() for path in pages.iterdir())
    assert len(files) > 1_000_000
    page = b"".join(token.to_bytes(4, "little") for token in tokens[:16])
    assert page not in files
    site.server = site.start()
    whole = len(tokens) // 16 * 16
    assert site.cached(site.alice, STORY) == whole
    assert site.server.stop() == 0
    site.keys.remove("alice")
    alice = site.keys.add("alice")
    site.server = site.start()
    assert site.cached(alice, STORY) == 0
    assert site.cached(site.mallory, STORY) == whole


def auc(scores: list[tuple[float, bool]]) -> float:
    """Chance that a score of a true case is above one of a false case; ties count half (Mann and Whitney)."""
    yes, no = ([score for score, label in scores if label is wanted] for wanted in (True, False))
    return sum((a > b) + (a == b) / 2 for a in yes for b in no) / (len(yes) * len(no))


def attack(site: Site, victim: str, attacker: str, seed: int) -> tuple[float, int]:
    """Guess, from the time to the first token, whether the victim has just asked for a prompt of 200 tokens.

    Returns the guesses' AUC, and how many prompts the attacker was told to be cached.
    """
    rng, scores, told = random.Random(seed), [], 0
    for _ in range(TRIALS):
        prompt, other = ([rng.randrange(1000, 40_000) for _ in range(200)] for _ in range(2))
        asked = rng.random() < 0.5
        site.complete(victim, prompt if asked else other)
        start = time.perf_counter()
        told += site.cached(attacker, prompt) > 0
        scores.append((start - time.perf_counter(), asked))
    return auc(scores), told


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_clock_tells_nothing_across_tenants_and_everything_within_one(site: Site) -> None:
    """Across tenants the AUC is 0.5 within three of its standard errors; within a tenant the same attack succeeds."""
    across, told = attack(site, site.alice, site.mallory, seed=1)
    half = TRIALS / 2
    error = ((2 * half + 1) / (12 * half * half)) ** 0.5
    within, seen = attack(site, site.alice, site.alice, seed=2)
    print(f"AUC across tenants {across:.3f} (standard error {error:.3f}), within one {within:.3f}")
    assert told == 0 and abs(across - 0.5) < 3 * error
    assert seen > half / 2 and within > 0.95
