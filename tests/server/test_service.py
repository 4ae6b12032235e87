"""The routes around generation, and the process's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import httpx
import pytest

from pagetrie import __version__
from tests.budget import first
from tests.server.double import BOS

pytestmark = pytest.mark.anyio


async def test_models(site):
    card = {"object": "model", "created": 1234, "owned_by": "pagetrie", "root": "tiny", "parent": None}
    listed = (await site.get("/v1/models")).json()
    assert listed == {
        "object": "list",
        "data": [{"id": name, **card, "max_model_len": 200} for name in ("tiny", "also-tiny")],
    }
    assert (await site.get("/v1/models/tiny")).json() == listed["data"][0]


async def test_small_routes(site):
    assert (await site.get("/version")).json() == {"version": __version__}
    assert (await site.get("/health")).status_code == 200
    async with site.client() as client:
        response = await client.post("/reset_prefix_cache")
    assert response.json() == {"freed_pages": 7, "busy_pages": 2}


async def test_tokenize_and_back(site):
    answer = (await site.post("/tokenize", {"prompt": "hi", "return_token_strs": True})).json()
    assert answer == {"count": 3, "max_model_len": 200, "tokens": [BOS, 104, 105], "token_strs": ["<s>", "h", "i"]}
    plain = (await site.post("/tokenize", {"prompt": "hi", "add_special_tokens": False})).json()
    assert plain["tokens"] == [104, 105] and plain["token_strs"] is None
    assert (await site.post("/detokenize", {"tokens": answer["tokens"]})).json() == {"prompt": "<s>hi"}
    assert (await site.post("/detokenize", {"tokens": []})).json() == {"prompt": ""}


async def test_tokenize_of_messages_is_what_chat_computes(site):
    messages = [{"role": "user", "content": "hi"}]
    tokens = (await site.post("/tokenize", {"messages": messages})).json()["tokens"]
    await site.post("/v1/chat/completions", {"messages": messages})
    assert list(site.engine.last.prompt_ids) == tokens


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "x", "foo": 1}, "foo"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
    ],
)
async def test_refusals(site, path, body, param):
    response = await site.post(path, body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


PROGRAM = """
from tests.server.conftest import Site
from tests.server.double import EngineDouble
from pagetrie.server.serve import serve
serve(Site(EngineDouble()).app, port=0, shutdown_timeout=1, on_ready=lambda url: print(url, flush=True))
print("stopped", flush=True)
"""


@pytest.mark.parametrize("number", first(1, [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_ends_the_process_with_success(number):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        url = process.stdout.readline().strip()
        with httpx.Client(base_url=url) as client:  # an idle kept-alive connection must not hold up the end
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert out == "stopped\n"


STUBBORN = """
import asyncio
from tests.server.conftest import Site
from tests.server.double import EngineDouble
from pagetrie.server.serve import serve

class Stubborn(EngineDouble):
    async def stop(self, *, drain_seconds=0.0):
        if drain_seconds:
            print("draining", flush=True)
            await asyncio.Event().wait()

site = Site(Stubborn(gate=asyncio.Event()))
serve(site.app, port=0, shutdown_timeout=600, on_ready=lambda url: print(url, flush=True))
print("stopped", flush=True)
"""


def test_a_second_signal_ends_the_waiting():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        url = process.stdout.readline().strip()
        body = {"prompt": "x", "stream": True}
        with httpx.Client(base_url=url) as client, client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "draining\n"
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert out == "stopped\n"
