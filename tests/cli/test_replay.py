"""``pagetrie replay`` and ``pagetrie plan`` as commands."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from pagetrie.cli.main import app
from pagetrie.errors import ConfigError
from tests.replay.test_index_only import random_trace

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": request.time * 1000,
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": request.pages,
        }
        for request in random_trace(1, requests=200, branching=3).requests
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def run(*words: str) -> Result:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_hits_of_all_policies(trace: Path) -> None:
    words = ("replay", str(trace), "--index-only", "--capacity", "20", "--capacity", "1000", "--eviction", "all")
    told = json.loads(run(*words, "--json").output)
    assert (told["requests"], told["page_tokens"]) == (200, 16)
    rates = {(row["eviction"], row["capacity"]): row["hit_rate"] for row in told["results"]}
    assert max(rate for (_, capacity), rate in rates.items() if capacity == 20) == rates["belady", 20]
    assert len({rate for (_, capacity), rate in rates.items() if capacity == 1000}) == 1
    shown = run(*words, "--plot", "-").output
    assert "s3-fifo" in shown and f"{rates['lru', 20]:.4f}" in shown and "gdsf 20 pages" in shown


def test_full_replay(trace: Path) -> None:
    words = (
        "replay", str(trace), "--capacity", "60", "--eviction", "lru", "--eviction", "adaptive", "--replicas", "2",
        "--requests", "50", "--model", "smollm2-135m", "--device", "l4", "--weights", "fp16",
    )  # fmt: skip
    words = tuple("bf16" if word == "fp16" else word for word in words)
    told = json.loads(run(*words, "--json").output)
    assert [row["eviction"] for row in told["results"]] == ["lru", "adaptive"]
    for row in told["results"]:
        assert row["requests"] == 50 and row["goodput"] > 0 and len(row["ttft"]) == 3
    assert "goodput, requests/s" in run(*words, "--plot", "-").output
    dear = json.loads(run(*words, "--json", "--step-cost", "5,0.1,0").output)
    assert dear["results"][0]["ttft"][0] > 5 > told["results"][0]["ttft"][0]


@pytest.mark.parametrize("index_only", [True, False])
def test_tiers_below_the_pool(trace: Path, tmp_path: Path, *, index_only: bool) -> None:
    file = tmp_path / "plot.svg"
    words = ["replay", str(trace), "--capacity", "40", "--requests", "100", "--json", "--plot", str(file)]
    words += ["--index-only"] if index_only else ["--step-cost", "0.01,0.01,0"]
    (alone,) = json.loads(run(*words).output)["results"]
    assert list(alone["hit_rates"]) == ["pool"]
    (row,) = json.loads(run(*words, "--ram-cache", "40MiB", "--disk-cap", "1GiB").output)["results"]
    assert list(row["hit_rates"]) == ["pool", "ram", "disk"]
    assert sum(row["hit_rates"].values()) == pytest.approx(row["hit_rate"])
    assert row["hit_rates"]["ram"] > 0 and row["hit_rate"] > alone["hit_rate"]
    assert "where the prompts were found" in file.read_text()
    (full,) = json.loads(run(*words, "--ram-cache", "40MiB").output)["results"]
    int8 = 20 * (2 * 1024**2 * 130 // 256)  # 128 bytes and a scale of two for each 256 bytes of fp16
    (packed,) = json.loads(run(*words, "--ram-cache", str(int8), "--ram-codec", "int8").output)["results"]
    assert packed["hit_rates"] == full["hit_rates"]
    words.remove("--json")
    assert "computed" in run(*words, "--ram-cache", "40MiB").output


def test_a_plan_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    run("plan", "llama-3.1-8b", "--device", "a100-80gb", "--batch", "2", "--plot", str(file))
    texts = [element.text for element in ElementTree.parse(file).iter(f"{SVG}text")]
    assert {"first token, ms", "time per token, ms", "contiguous", "int4", "2 at once"} <= set(texts)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--eviction", "newest"), "no eviction policy 'newest'; there are lru, fifo"),
        (("--routing", "best"), "no routing 'best'"),
        (("--prefix-index", "b-tree"), "no prefix index 'b-tree'"),
        (("--model", "gpt-9"), "no known shape and no file 'gpt-9'"),
        (("--device", "abacus"), "no known device 'abacus'"),
        (("--step-cost", "1,2"), "takes three numbers"),
        (("--step-cost", "0,0,0"), "takes more than 0 seconds"),
        (("--page-size", "7"), "aren't made of pages of 7"),
        (("--ram-cache", "much"), "--ram-cache: "),
        (("--ram-cache", "1KiB"), "ram: 1024 bytes hold no page: one takes 2097152 bytes"),
        (("--ram-codec", "int8"), "--ram-codec int8 needs --ram-cache"),
        (("--ram-cache", "1GiB", "--ram-codec", "zip"), "no codec 'zip' for memory; there are none, int8, k8v4"),
        (("--ram-cache", "1GiB", "--ram-codec", "int8", "--model", "deepseek-v3"), "deepseek-v3 keeps a latent vector"),
        (("--index-only", "--disk-cap", "2MB"), "disk: 2000000 bytes hold no page"),
        (("--index-only", "--plot", "/no/such/folder/plot.svg"), "can't write the plot"),
    ],
)
def test_mistakes_are_named(trace: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run("replay", str(trace), *words)


def test_a_plan() -> None:
    words = (
        "plan", "llama-3.1-70b", "--device", "h100-80gb", "--weight-bytes", "38GB", "--context", "32768",
        "--prompt", "2000", "--output", "300", "--shared", "1000",
    )  # fmt: skip
    told = json.loads(run(*words, "--json").output)
    (fp16,) = (fit for fit in told["fits"] if fit["codec"] == "fp16")
    assert fp16["bytes_per_token"] == 327_680 and fp16["contiguous"] in (2, 3)
    assert told["ttft"]["warm"] < told["ttft"]["cold"]
    assert told["miss"]["prefix_tokens"] == 1000
    shown = run(*words, "--plot", "-").output
    assert "320 KiB" in shown and "contiguous fp16" in shown


def test_a_plan_from_a_config(tmp_path: Path) -> None:
    from tests.plan.test_estimate import CONFIGS

    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-3.1-8b"]))
    told = json.loads(run("plan", str(tmp_path), "--device", "a100-80gb", "--json").output)
    assert told["model"]["layers"] == 32 and told["weight_bytes"] == pytest.approx(16.06e9, rel=0.01)


def test_a_shape_alone_cannot_be_measured() -> None:
    with pytest.raises(ConfigError, match="name a device"):
        run("plan", "llama-3.1-8b")
