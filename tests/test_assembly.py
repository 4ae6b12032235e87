"""How the pool and the context limit come out of the settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagetrie import LLM, SamplingParams
from pagetrie.assembly import build, context_limit, engine_config, pool_pages
from pagetrie.errors import ConfigError
from pagetrie.kv import CacheManager, ContiguousCacheManager
from pagetrie.settings import Settings
from tests.models.tiny import tiny_model, write_folder


@pytest.mark.parametrize(
    ("settings", "pages"),
    [
        (Settings(), (1 << 30) // 5000),
        (Settings(kv_memory=5000), 1),
        (Settings(kv_memory=14_999), 2),
        (Settings(num_pages=7), 7),
    ],
)
def test_the_pool_holds_what_was_asked_for(settings: Settings, pages: int) -> None:
    assert pool_pages(settings, page_bytes=5000) == pages


def test_memory_for_less_than_a_page_is_refused_with_both_sizes() -> None:
    with pytest.raises(ConfigError, match=r"--kv-memory of 4\.883 KiB holds no page: .* takes 5 KiB"):
        pool_pages(Settings(kv_memory=5000), page_bytes=5120)


def test_the_context_limit_is_the_models_or_what_the_pool_holds() -> None:
    assert context_limit(Settings(), model_context=8192, num_pages=1000) == 8192
    assert context_limit(Settings(), model_context=8192, num_pages=32) == 512
    assert context_limit(Settings(max_model_len=100), model_context=8192, num_pages=32) == 100
    assert context_limit(Settings(max_model_len=512), model_context=512, num_pages=32) == 512


@pytest.mark.parametrize(("asked", "words"), [(8193, "8193 .* context of 8192"), (513, "513 .* 512 tokens")])
def test_a_longer_context_than_model_or_pool_is_refused(asked: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        context_limit(Settings(max_model_len=asked), model_context=8192, num_pages=32)


def test_what_decides_a_pages_bytes_is_in_its_namespace() -> None:
    prints = {
        engine_config(Settings(weights=weights, kv_dtype=kv, ram_codec=codec), 100, fingerprint).model_fingerprint
        for weights in ("fp16", "fp32")
        for kv in ("fp16", "fp32")
        for codec in ("none", "int8", "k8v4")
        for fingerprint in ("a", "b")
    }
    assert len(prints) == 24


def test_pages_of_servers_without_a_codec_keep_their_names() -> None:
    assert engine_config(Settings(), 100, "a").model_fingerprint == "a:q4:fp16:1"


def test_pages_of_another_kind_are_never_hit(tmp_path: Path) -> None:
    """D10, D4: stored on disk by one model with one format; another format, page size, model or secret finds nothing,
    what is the same finds all of it, before and after."""
    model = tiny_model("llama")
    folder = write_folder(tmp_path / "model", model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.001)
    retrained = write_folder(tmp_path / "retrained", model)
    turned = write_folder(tmp_path / "turned", tiny_model("llama", rope_parameters={"rope_theta": 20000.0}))
    prompt = [7 + number for number in range(65)]

    def cached(model: Path, **options: object) -> tuple[int, dict[str, int], int]:
        """Cached tokens, those by tier, and loads that were begun."""
        settings = {"weights": "fp32", "kv_dtype": "fp16", "page_size": 16, "num_pages": 16, "threads": 1, **options}
        with LLM(model, max_model_len=128, disk_cache=tmp_path / "pages", disk_cap=10**7, **settings) as llm:
            (result,) = llm.generate([prompt], SamplingParams(max_tokens=1), progress=False)
            report = llm._parts.engine.transfer_report()
            assert report is not None
            return result.cached_tokens, result.cached_by_tier, report.transfers.loads

    everything, nothing = (64, {"disk": 64}, 1), (0, {}, 0)
    assert [cached(folder) for _ in range(2)] == [nothing, everything]
    others = (
        cached(folder, kv_dtype="fp32"),
        cached(folder, page_size=32),
        cached(folder, weights="fp16"),
        cached(retrained),
        cached(turned),
    )
    assert others == (nothing,) * 5
    assert [cached(one) for one in (folder, retrained, turned)] == [everything] * 3
    (tmp_path / "pages" / "secret").write_bytes(bytes(32))
    assert [cached(folder) for _ in range(2)] == [nothing, everything]


def test_contradicting_budgets_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        engine_config(Settings(max_num_seqs=64, max_num_batched_tokens=63), 100)


def test_layout_index_name_and_template_are_as_set(bundled_model: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    parts = build(
        Settings(
            model=bundled_model,
            threads=1,
            num_pages=40,
            max_model_len=64,
            kv_layout="contiguous",
            chat_template=template,
        )
    )
    assert isinstance(parts.cache, ContiguousCacheManager)
    assert parts.cache.pages_for(1) == 4
    assert (parts.name, parts.max_model_len) == (bundled_model.stem, 64)
    assert parts.chat_template is not None
    assert parts.chat_template.render([{"role": "user", "content": "hi"}]) == "<hi>"
    assert parts.page_bytes == 2 * 30 * 3 * 64 * 2 * 16


def test_a_missing_template_file_is_refused(bundled_model: Path, tmp_path: Path) -> None:
    settings = Settings(model=bundled_model, threads=1, num_pages=4, chat_template=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"can't read the chat template .*none: No such file"):
        build(settings)


def test_the_default_pool_is_paged_and_indexed(bundled_model: Path) -> None:
    parts = build(Settings(model=bundled_model, threads=1, num_pages=8, prefix_index="hash", served_model_name="mine"))
    assert isinstance(parts.cache, CacheManager)
    assert type(parts.cache.index).__name__ == "HashIndex"
    assert (parts.name, parts.max_model_len) == ("mine", 128)
