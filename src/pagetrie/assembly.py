"""From settings to a running engine: opens the model, sizes the pool, puts the parts together."""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pagetrie.bundled import bundled_model_path
from pagetrie.engine.config import EngineConfig
from pagetrie.engine.engine import Engine
from pagetrie.engine.observer import EngineObserver
from pagetrie.errors import ConfigError
from pagetrie.kv import CacheManager, ContiguousCacheManager, EvictionLog, KVCache
from pagetrie.kv.eviction import make_policy
from pagetrie.kv.keys import SECRET_BYTES
from pagetrie.kv.tiers.codec import namespace_suffix
from pagetrie.models.config import ModelConfig
from pagetrie.models.loading import load_checkpoint
from pagetrie.runner.model_runner import ModelRunner
from pagetrie.runner.page_codec import make_page_codec
from pagetrie.runner.storage import LAYOUT_VERSION, PageStorage, bytes_per_page
from pagetrie.settings import Settings, flag, format_size, parse_size
from pagetrie.text.chat_template import ChatTemplate
from pagetrie.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagetrie.kv.transfers import Transfers

log = logging.getLogger(__name__)

DEFAULT_KV_MEMORY = "1GiB"


@dataclass(slots=True)
class Parts:
    """A model ready to run, and what stands around it.

    Attributes:
        name: what clients call the model.
        max_model_len: longest prompt plus output, in tokens.
        page_bytes: bytes of one page.
    """

    settings: Settings
    name: str
    config: ModelConfig
    fingerprint: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    cache: KVCache
    engine: Engine
    max_model_len: int
    page_bytes: int


def build(
    settings: Settings,
    *,
    make_observer: Callable[[str, int], EngineObserver] | None = None,
    wrap_cache: Callable[[KVCache], KVCache] = lambda cache: cache,
    default_disk_cache: Path | None = None,
    public_salt: bytes = b"",
) -> Parts:
    """Open the model and build its engine.

    Args:
        settings: the options.
        make_observer: makes what hears the engine, from the model's name and its context limit in tokens.
        wrap_cache: may put something around the cache, to watch it.
        default_disk_cache: where to keep pages if the settings say nothing about it; if that can't be, none are kept.
        public_salt: secret part of the namespace of pages that all tenants share.

    Raises:
        ModelLoadError: the model can't be used.
        ConfigError: the options don't fit the model or this machine.
    """
    path = settings.model if settings.model is not None else bundled_model_path()
    checkpoint = load_checkpoint(path, settings.cache_dir)
    config = checkpoint.config
    page_bytes = bytes_per_page(config, settings.page_size, settings.kv_dtype)
    num_pages = pool_pages(settings, page_bytes)
    max_model_len = context_limit(settings, config.max_position, num_pages)
    name = settings.served_model_name or _public_name(settings.model)
    limits = engine_config(settings, max_model_len, checkpoint.fingerprint, public_salt)
    tokenizer = checkpoint.tokenizer()
    template = chat_template(settings, tokenizer)
    runner = ModelRunner(
        checkpoint,
        num_pages=num_pages,
        page_size=settings.page_size,
        weights=settings.weights,
        kv_dtype=settings.kv_dtype,
        attention=settings.attention,
        threads=settings.threads,
    )
    cache = wrap_cache(_cache(settings, runner.storage, config, max_model_len, default_disk_cache))
    engine = Engine(
        runner=runner,
        cache=cache,
        vocabulary=tokenizer,
        config=limits,
        clock=time.monotonic,
        rng=random.Random(settings.seed),
        observer=make_observer(name, max_model_len) if make_observer else None,
    )
    return Parts(
        settings=settings,
        name=name,
        config=config,
        fingerprint=checkpoint.fingerprint,
        tokenizer=tokenizer,
        chat_template=template,
        cache=cache,
        engine=engine,
        max_model_len=max_model_len,
        page_bytes=page_bytes,
    )


def engine_config(
    settings: Settings, max_model_len: int, fingerprint: str = "", public_salt: bytes = b""
) -> EngineConfig:
    """The engine's own limits. What decides the bytes of a page goes into its namespace with the fingerprint.

    Raises:
        ConfigError: they contradict each other.
    """
    return EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_queue=settings.max_queue,
        ageing_steps=settings.ageing_steps,
        max_bypass=settings.max_bypass,
        max_contexts=settings.max_contexts,
        public_salt=public_salt,
        model_fingerprint=f"{fingerprint}:{settings.weights}:{settings.kv_dtype}:{LAYOUT_VERSION}"
        + namespace_suffix(settings.ram_codec),
    )


def pool_pages(settings: Settings, page_bytes: int) -> int:
    """Pages in the pool: as told, or as many as the memory holds.

    Raises:
        ConfigError: the memory doesn't hold one page.
    """
    if settings.num_pages is not None:
        return settings.num_pages
    memory = settings.kv_memory if settings.kv_memory is not None else int(str(parse_size(DEFAULT_KV_MEMORY)))
    if memory < page_bytes:
        raise ConfigError(
            f"{flag('kv_memory')} of {format_size(memory)} holds no page: "
            f"one page of {settings.page_size} tokens takes {format_size(page_bytes)} with this model"
        )
    return memory // page_bytes


def context_limit(settings: Settings, model_context: int, num_pages: int) -> int:
    """The longest prompt plus output: what was asked for, else the model's context or the pool, whichever is smaller.

    Raises:
        ConfigError: more was asked for than the model or the pool can hold.
    """
    pool = num_pages * settings.page_size
    if settings.max_model_len is None:
        return min(model_context, pool)
    if settings.max_model_len > model_context:
        raise ConfigError(
            f"{flag('max_model_len')} {settings.max_model_len} is more than the model's context of "
            f"{model_context} tokens"
        )
    if settings.max_model_len > pool:
        raise ConfigError(
            f"{flag('max_model_len')} {settings.max_model_len} is more than the {pool} tokens that the pool of "
            f"{num_pages} pages holds; give it more memory or pages"
        )
    return settings.max_model_len


def _cache(
    settings: Settings,
    storage: PageStorage,
    config: ModelConfig,
    max_model_len: int,
    default_disk_cache: Path | None,
) -> KVCache:
    shares = settings.kv_layout == "paged" and settings.prefix_index != "none"
    asked = [flag(name) for name in ("ram_cache", "disk_cache", "store") if getattr(settings, name) is not None]
    if settings.no_disk_cache and settings.disk_cache is not None:
        raise ConfigError(f"give either {flag('disk_cache')} or {flag('no_disk_cache')}, not both")
    if settings.encrypt_cache and settings.api_keys is None:
        raise ConfigError(
            f"{flag('encrypt_cache')} needs {flag('api_keys')}: pages are sealed under their tenants' secrets"
        )
    if settings.ram_codec != "none" and settings.ram_cache is None:
        raise ConfigError(f"{flag('ram_codec')} {settings.ram_codec} needs {flag('ram_cache')}")
    if asked and not shares:
        raise ConfigError(f"{' and '.join(asked)} need shared prefixes: a paged layout and a prefix index")
    if settings.kv_layout == "contiguous":
        return ContiguousCacheManager(
            num_pages=storage.num_pages, page_size=settings.page_size, max_tokens=max_model_len
        )
    default = None if settings.no_disk_cache or settings.disk_cache is not None or not shares else default_disk_cache
    transfers, secret = _tiers(settings, storage, config.attention_share(), default)
    return CacheManager(
        num_pages=storage.num_pages,
        page_size=settings.page_size,
        index=settings.prefix_index,
        secret=secret,
        hold_limit=int(settings.max_pinned * storage.num_pages),
        transfers=transfers,
        evictions=EvictionLog(time.monotonic),
        policy=make_policy(settings.eviction, storage.num_pages, settings.page_size, time.monotonic),
    )


def _tiers(
    settings: Settings, storage: PageStorage, attention: float, default_disk: Path | None
) -> tuple[Transfers | None, bytes]:
    if default_disk is None and settings.ram_cache is None and settings.disk_cache is None and settings.store is None:
        return None, secrets.token_bytes(SECRET_BYTES)
    from pagetrie.kv.tiers.opening import TierOptions, open_tiers  # only who has tiers waits for their imports

    options = TierOptions(
        ram_bytes=settings.ram_cache or 0,
        ram_codec=make_page_codec(settings.ram_codec, storage),
        disk=settings.disk_cache.expanduser() if settings.disk_cache is not None else None,
        disk_bytes=settings.disk_cap,
        store=settings.store,
        secret=_store_secret(settings),
        sealed=settings.encrypt_cache,
    )
    if default_disk is not None:
        try:
            return open_tiers(replace(options, disk=default_disk), storage, attention=attention)
        except ConfigError as error:
            log.warning("pages are not kept on disk: %s", error)
    return open_tiers(options, storage, attention=attention)


def _store_secret(settings: Settings) -> bytes | None:
    """The key that servers on one store have in common.

    Raises:
        ConfigError: a store without a secret.
    """
    from pagetrie.kv.tiers.opening import derive_secret

    if settings.store is None:
        return None
    if settings.store_secret is None:
        raise ConfigError(
            f"{flag('store')} needs {flag('store_secret')} (or PAGETRIE_STORE_SECRET), the same for all servers on the "
            "store: it keys the names of pages and signs them. Make one with: openssl rand -hex 32"
        )
    return derive_secret(settings.store_secret.get_secret_value())


def _public_name(model: Path | None) -> str:
    """The file's or folder's name: what a file says about itself is often a trainer's working title."""
    if model is None:
        return "SmolLM2-135M-Instruct"
    path = model.expanduser().resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def chat_template(settings: Settings, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that the settings name, or the model's own; None if there is none."""
    source = None if settings.chat_template is None else _read(settings.chat_template)
    return ChatTemplate.of(tokenizer, source) or None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't read the chat template {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the chat template {path} is not UTF-8 text") from error
