"""``--ram-codec`` from the option to the answer: what comes back from memory, and who else may have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pagetrie import LLM, SamplingParams
from pagetrie.errors import ConfigError
from pagetrie.kv import CacheManager
from pagetrie.kv.estimates import PrefillSpeed
from pagetrie.kv.tiers.codec import CodecName
from pagetrie.llm import RequestResult
from pagetrie.runner.page_codec import make_page_codec
from pagetrie.runner.storage import PageStorage
from tests.models.tiny import tiny_model, write_folder

PROMPT = list(range(3, 196))
CACHED = 192  # whole pages of 16 tokens: all but the last token, which is always computed
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
CODECS: tuple[CodecName, ...] = ("none", "int8", "k8v4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"), tiny_model("llama"))


@pytest.fixture
def start(folder: Path) -> Callable[..., LLM]:
    def made(**settings: object) -> LLM:
        return LLM(folder, weights="q8", num_pages=40, threads=1, **settings)

    return made


@contextmanager
def opened(llm: LLM) -> Iterator[tuple[CacheManager, PageStorage]]:
    """A model's cache and its pages; everything is closed in the end."""
    with llm:
        cache = llm._parts.cache
        assert isinstance(cache, CacheManager)
        storage = llm._parts.engine._runner.storage  # type: ignore[attr-defined]
        assert isinstance(storage, PageStorage)
        yield cache, storage


def prefer_loading(llm: LLM) -> None:
    """As if computing were slow, and what was loaded last had been so long ago."""
    cache = llm._parts.cache
    assert isinstance(cache, CacheManager) and cache.transfers is not None
    cache.transfers._prefill = PrefillSpeed(0.0)
    cache.transfers.note_prefill(1, 0, 10.0)
    cache.transfers._avoided._until.clear()


def ask(llm: LLM) -> RequestResult:
    (result,) = llm.generate([PROMPT], GREEDY, progress=False)
    return result


def logprobs(result: RequestResult) -> list[object]:
    return [(token.token_id, token.logprob) for token in result.choices[0].logprobs]


@pytest.mark.parametrize("name", ["int8", "k8v4"])
@pytest.mark.parametrize("kv_dtype", ["fp16", "fp32"])
def test_what_comes_back_from_memory_is_rounded_once_and_said_to_come_from_there(
    start: Callable[..., LLM], name: CodecName, kv_dtype: str
) -> None:
    llm = start(kv_dtype=kv_dtype)
    with opened(llm) as (cache, storage):
        first = ask(llm)
        codec = make_page_codec(name, storage)
        assert codec is not None
        encoded = np.empty(codec.encoded_bytes, np.uint8)
        for node in cache.index.nodes():
            for page in node.pages:
                assert codec.encode(storage.read_page(page), encoded)
                codec.decode(encoded, storage.read_page(page))
        rounded = ask(llm)
    assert logprobs(rounded) != logprobs(first)  # so that the rest says something

    llm = start(kv_dtype=kv_dtype, ram_cache="1MiB", ram_codec=name)
    with opened(llm) as (cache, _):
        assert logprobs(ask(llm)) == logprobs(first)
        assert cache.transfers is not None
        for _ in range(3):
            prefer_loading(llm)
            cache.index.evict(cache.index.cached_pages)
            again = ask(llm)
            assert again.cached_by_tier == {"ram": CACHED}
            assert (logprobs(again), again.text) == (logprobs(rounded), rounded.text)
        stats = cache.transfers.report().tiers["ram"]
        assert stats.pages * codec.encoded_bytes <= stats.used_bytes < stats.pages * codec.page_bytes
        assert stats.hit_bytes == stats.hit_pages * codec.encoded_bytes


@pytest.mark.parametrize("medium", ["disk", "store"])
def test_d10_caches_of_other_codecs_share_nothing(start: Callable[..., LLM], tmp_path: Path, medium: str) -> None:
    """D10: a store or a folder that other codecs' pages lie in gives 0 hits; one's own are found."""
    where: dict[str, object] = {"disk_cache": tmp_path}
    if medium == "store":
        where = {"store": f"file://{tmp_path}", "store_secret": "a secret of sixteen"}
    hits = []
    for name in (*CODECS, *CODECS):
        with start(ram_cache="1MiB", ram_codec=name, **where) as llm:
            prefer_loading(llm)
            hits.append(ask(llm).cached_tokens)
    assert hits[:3] == [0, 0, 0]
    assert all(found >= CACHED for found in hits[3:])


def test_a_codec_without_memory_is_refused(start: Callable[..., LLM]) -> None:
    with pytest.raises(ConfigError, match="--ram-codec int8 needs --ram-cache"):
        start(ram_codec="int8")
    with pytest.raises(ConfigError, match="holds no page: one takes"):
        start(ram_codec="int8", ram_cache="1KiB")
