"""Branching on real models: beams against transformers, contexts and forks against lone runs, and under pressure."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pagetrie import LLM, SamplingParams
from pagetrie.models.loading import load_checkpoint
from tests.e2e.conftest import BIG_CONTEXT, Server
from tests.models.tiny import tiny_model, write_folder

STARTS = (
    "The capital of France is", "Once upon a time, there was", "def fibonacci(n):", "The best way to learn is",
    "In the year 2050, people", "Water boils at", "Dear Sir or Madam,", "1, 2, 3, 4,", "My favourite colour is",
    "The three laws of robotics are",
)  # fmt: skip
TRUNK = "A traveller comes to a crossroads with four signs. " * 12
TAILS = (" The first sign says", " The second sign says", " The third sign says", " The last sign says")


def compare_with_transformers(llm: LLM, model: PreTrainedModel, prompts: list[list[int]], tokens: int) -> None:
    """Width 4, both of the best two hypotheses, token by token."""
    ends = sorted(llm._parts.tokenizer.eos_ids)
    params = SamplingParams(n=2, beam_width=4, max_tokens=tokens)
    ours = llm.generate(prompts, params, progress=False)
    for prompt, result in zip(prompts, ours, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]),
            num_beams=4,
            num_return_sequences=2,
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=ends,
            pad_token_id=ends[0],
        )
        for choice, row in zip(result.choices, theirs.tolist(), strict=True):
            answer = row[len(prompt) :]
            stop = next((place for place, token in enumerate(answer) if token in ends), len(answer))
            assert choice.token_ids == answer[:stop]
            assert choice.finish_reason == ("stop" if stop < len(answer) else "length")


def test_beams_on_a_tiny_model_are_those_of_transformers(tmp_path: Path) -> None:
    model = tiny_model("llama").eval()
    folder = write_folder(tmp_path / "tiny", model)
    prompts = [[(7 * i * i + 3 * j) % 285 + 3 for i in range(5 + 9 * j)] for j in range(3)]
    with LLM(folder, weights="fp32", kv_dtype="fp32", num_pages=64, threads=1) as llm:
        compare_with_transformers(llm, model, prompts, tokens=12)
        assert llm.cache_stats().active_pages == 0
    with LLM(folder, weights="fp32", kv_dtype="fp32", num_pages=14, max_model_len=96, threads=1) as llm:
        compare_with_transformers(llm, model, prompts, tokens=12)  # the groups wait for each other


@pytest.fixture(scope="module")
def real_reference(bundled_model: Path) -> PreTrainedModel:
    checkpoint = load_checkpoint(bundled_model, None)
    config = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position,
            rms_norm_eps=config.rms_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.tie_embeddings,
        )
    )
    names = [name for name in model.state_dict() if checkpoint.has_tensor(name)]
    missing, unexpected = model.load_state_dict({name: checkpoint.tensor(name).float() for name in names}, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    return model.eval()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_beams_on_the_real_model_are_those_of_transformers(
    bundled_model: Path, real_reference: PreTrainedModel
) -> None:
    with LLM(bundled_model, weights="fp32", kv_dtype="fp32", num_pages=200, threads=1) as llm:
        prompts = [llm._parts.tokenizer.encode(start) for start in STARTS]
        compare_with_transformers(llm, real_reference, prompts, tokens=32)


def test_four_branches_hold_the_trunk_once_with_the_text_they_would_have_alone(big: Server) -> None:
    """75 % of the pages saved, exactly the same text: also when all four start at once on a cold trunk."""
    big.reset()
    before = big.idle()
    made = big.http.post("/v1/contexts", json={"prompt": TRUNK}).json()
    assert made["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    forks = big.http.post(f"/v1/contexts/{made['id']}/fork", json={"n": 4}).json()["data"]
    assert big.metrics()["pagetrie:pinned_pages"] == made["pages"]
    assert sum(fork["pages"] for fork in forks) == 4 * made["pages"]
    texts: dict[str, Any] = {}

    def branch(fork: dict[str, Any], tail: str) -> None:
        body = {"context": fork["id"], "prompt": tail, "max_tokens": 16, "temperature": 0, "append": True}
        texts[tail] = big.http.post("/v1/completions", json=body).json()

    threads = [threading.Thread(target=branch, args=pair) for pair in zip(forks, TAILS, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = {}
    for tail, answer in texts.items():
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == made["tokens"]
        own[tail] = answer["usage"]["prompt_tokens"] + 16 - made["tokens"]
    pinned = big.metrics()["pagetrie:pinned_pages"]
    assert pinned <= made["pages"] + sum(-(-tokens // 16) + 1 for tokens in own.values())
    for context in (made, *forks):
        assert big.http.delete(f"/v1/contexts/{context['id']}").json()["deleted"]
    assert big.idle()["pagetrie:pinned_pages"] == before["pagetrie:pinned_pages"] == 0
    big.reset()
    ids = big.http.post("/tokenize", json={"prompt": TRUNK}).json()["tokens"]
    for tail in TAILS:
        more = big.http.post("/tokenize", json={"prompt": tail, "add_special_tokens": False}).json()["tokens"]
        alone = big.complete([*ids, *more], max_tokens=16, cache_prompt=False)
        assert alone["choices"][0]["text"] == texts[tail]["choices"][0]["text"]  # type: ignore[index]


def test_b5_beams_and_forks_in_a_pool_too_small_for_all_share_it_or_wait(small: Server) -> None:
    """Forking with too few free pages neither crashes nor frees twice, and the answers are those of a lone run."""
    bodies: list[dict[str, Any]] = [
        {"prompt": " ".join(STARTS[:4]), "beam_width": 4, "n": 2, "max_tokens": 24, "ignore_eos": True},
        {"prompt": TRUNK[:300], "n": 8, "seed": 3, "temperature": 1, "max_tokens": 24, "ignore_eos": True},
        {"prompt": " ".join(STARTS[4:]), "beam_width": 4, "max_tokens": 24, "ignore_eos": True},
    ]
    alone = [small.complete(**{"prompt": None, **body})["choices"] for body in bodies]
    together: list[Any] = [None] * len(bodies)

    def run(number: int) -> None:
        together[number] = small.complete(**{"prompt": None, **bodies[number]})["choices"]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert small.idle()['pagetrie:pages{state="active"}'] == 0


def test_i4_four_branches_started_at_once_on_a_cold_trunk_compute_it_once(big: Server) -> None:
    big.reset()
    before = big.idle()["pagetrie:prefill_tokens_total"]
    threads = [threading.Thread(target=big.complete, args=(TRUNK + tail,), kwargs={"max_tokens": 4}) for tail in TAILS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trunk = len(big.http.post("/tokenize", json={"prompt": TRUNK}).json()["tokens"])
    assert big.idle()["pagetrie:prefill_tokens_total"] - before <= trunk + 4 * 10 + 4 * 16


def test_held_contexts_give_way_to_a_request_that_needs_the_pool(small: Server) -> None:
    made = [small.http.post("/v1/contexts", json={"prompt": start * 6}).json() for start in STARTS[:3]]
    assert sum(entry["held_tokens"] for entry in made) == sum(entry["tokens"] for entry in made)
    answer = small.complete([5] * 490, max_tokens=16, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
    shown = [small.http.get(f"/v1/contexts/{entry['id']}").json() for entry in made]
    assert any(entry["held_tokens"] == 0 for entry in shown)
    for entry, start in zip(made, STARTS, strict=False):
        body = {"context": entry["id"], "max_tokens": 8, "temperature": 0}
        after = small.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        plain: Any = small.complete(start * 6, max_tokens=8, cache_prompt=False)
        assert after == plain["choices"][0]["text"]
        small.http.delete(f"/v1/contexts/{entry['id']}").raise_for_status()
    small.idle()


def test_a_client_that_leaves_while_its_context_is_computed_leaves_none(big: Server) -> None:
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{big.url}/v1/contexts", json={"prompt": [7] * (BIG_CONTEXT - 1)}, timeout=0.05)
    big.idle()
    assert big.wait_until(lambda metrics: metrics["pagetrie:contexts"] == 0)["pagetrie:pinned_pages"] == 0


@pytest.mark.slow
def test_a_warm_file_is_computed_before_the_server_is_ready(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    path = tmp_path / "warm.jsonl"
    system = {"role": "system", "content": TRUNK}
    path.write_text(json.dumps({"messages": [system], "pin": True}) + "\n" + json.dumps({"prompt": STARTS[0]}))
    server = start_server("--num-pages", "100", "--warm", str(path))
    messages = [system, {"role": "user", "content": "Which way?"}]
    body = {"messages": messages, "max_tokens": 1}
    usage = server.http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 100
    assert server.metrics()["pagetrie:pinned_pages"] > 6
    assert server.http.get("/v1/contexts").json()["data"] == []
