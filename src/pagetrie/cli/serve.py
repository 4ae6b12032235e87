"""``pagetrie serve``: the model, the engine on its thread, the HTTP server."""

from __future__ import annotations

import gc
import ipaddress
import logging
import sys

from pagetrie import __version__
from pagetrie.assembly import Parts, build
from pagetrie.engine.loop import EngineLoop
from pagetrie.engine.observer import EngineObserver, Observers
from pagetrie.engine.recording import TraceRecorder
from pagetrie.engine.timeline import Timeline
from pagetrie.errors import ConfigError
from pagetrie.paths import cache_dir
from pagetrie.server.app import create_app
from pagetrie.server.auth import Access, KeyedAccess
from pagetrie.server.exchange import json_log, plain_log
from pagetrie.server.metrics import Metrics
from pagetrie.server.public_prefixes import read_public_prefixes
from pagetrie.server.serve import serve as run_until_stopped
from pagetrie.server.tracing import RequestTracer, open_tracer, wanted_by_environment
from pagetrie.server.warm import read_warm_file
from pagetrie.settings import Settings, flag, format_size

log = logging.getLogger(__name__)


def serve(settings: Settings) -> None:
    """Serve until a signal says stop.

    Raises:
        ConfigError: an option doesn't fit the model or the machine, or the address is taken.
        ModelLoadError: the model can't be used.
    """
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    access = _access(settings)
    made: list[Metrics] = []
    tracers: list[RequestTracer] = []
    recorder = None if settings.record is None else TraceRecorder(settings.record.expanduser(), settings.page_size)
    timeline = Timeline()

    def make_observer(name: str, max_model_len: int) -> EngineObserver:
        labels = {
            "cache_dtype": settings.kv_dtype,
            "enable_prefix_caching": str(settings.prefix_index != "none" and settings.kv_layout == "paged"),
            "prefix_index": settings.prefix_index,
            "kv_layout": settings.kv_layout,
            "ram_codec": settings.ram_codec,
        }
        made.append(Metrics(name, max_model_len, labels))
        if (tracer := _tracer(settings, name)) is not None:
            tracers.append(tracer)
        return Observers([made[0], timeline, *([] if recorder is None else [recorder]), *tracers])

    # A plain chat client finds its prefixes again after a restart, with no call of its own.
    pages = (settings.cache_dir or cache_dir()) / "pages"
    salt = b"" if access is None else access.public_salt
    parts = build(settings, make_observer=make_observer, default_disk_cache=pages, public_salt=salt)
    warm, public = [], []
    if settings.warm is not None:
        tenants = {tenant.name: tenant for tenant in (access or Access()).tenants()}
        warm = read_warm_file(settings.warm, parts.tokenizer, parts.chat_template, parts.engine.validate, tenants)
    if settings.public_prefix is not None:
        public = read_public_prefixes(settings.public_prefix, parts.tokenizer, parts.chat_template)
    app = create_app(
        loop=EngineLoop(parts.engine),
        tokenizer=parts.tokenizer,
        chat_template=parts.chat_template,
        model_name=parts.name,
        max_model_len=parts.max_model_len,
        metrics=made[0],
        timeline=timeline,
        max_body_bytes=settings.max_body_size,
        context_ttl=settings.context_ttl,
        stuck_after=settings.stuck_after,
        warm=warm,
        public=public,
        access=access,
        access_log={"plain": plain_log, "json": json_log(), "off": None}[settings.access_log],
        trace_headers=tracers[0].headers if tracers else (),
        system_fingerprint=f"pt_{parts.fingerprint[:12]}",
    )
    # What is loaded by now stays: collections needn't look through it, which takes a tenth of a second in mid-stream.
    gc.collect()
    gc.freeze()
    try:
        run_until_stopped(
            app,
            settings.host,
            settings.port,
            shutdown_timeout=settings.shutdown_timeout,
            request_timeout=settings.request_timeout,
            on_ready=lambda url: print(start_line(parts, url), flush=True),
        )
    finally:
        if recorder is not None:
            recorder.close()
        for tracer in tracers:
            tracer.close()


def _tracer(settings: Settings, model_name: str) -> RequestTracer | None:
    """What traces requests, if that was asked for.

    Raises:
        ConfigError: the option asked for it, and it isn't possible.
    """
    endpoint = settings.otlp_traces_endpoint
    if endpoint is None and not wanted_by_environment():
        return None
    try:
        return open_tracer(endpoint, model_name, __version__)
    except ConfigError as error:
        if endpoint is not None:
            raise
        log.warning("no traces, though OTEL_EXPORTER_OTLP_ENDPOINT is set: %s", error)
        return None


def _access(settings: Settings) -> KeyedAccess | None:
    """Whom to let in. Without keys only this machine, unless it is said that all may come.

    Raises:
        ConfigError: the keys can't be used, or there are none and the address is a public one.
    """
    if settings.api_keys is not None:
        return KeyedAccess(
            settings.api_keys.expanduser(),
            settings.max_queue,
            sealed=settings.encrypt_cache,
            floors=settings.tenant_floors,
            cap=settings.tenant_cap,
        )
    if not settings.insecure and not is_loopback(settings.host):
        raise ConfigError(
            f"without API keys anybody who reaches {flag('host')} {settings.host} may use the server and its cache; "
            f"make keys with `pagetrie tenant add` and give {flag('api_keys')}, or say {flag('insecure')}"
        )
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen on."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def start_line(parts: Parts, url: str) -> str:
    """What a person wants to know first: the model, how much the pool holds, where to reach it."""
    cache = parts.cache
    return (
        f"pagetrie serves {parts.name} at {url} "
        f"(pool: {cache.num_pages:,} pages of {cache.page_size} tokens = {cache.num_pages * cache.page_size:,} tokens, "
        f"{format_size(cache.num_pages * parts.page_bytes)}; context: {parts.max_model_len:,} tokens)"
    )
