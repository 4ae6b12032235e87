"""Every option of pagetrie, once: its type, its default, its limits and its help.

Values come from, in this order: a flag (or keyword argument), a ``PAGETRIE_*`` variable, a TOML file, the default.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from pagetrie.errors import ConfigError

ENV_PREFIX = "PAGETRIE_"
DEFAULT_CONFIG = Path("pagetrie.toml")

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power


def parse_size(value: object) -> object:
    """Bytes from "2GiB", "512 MiB", "1.5GB" or a plain number; other types pass through to be judged by pydantic.

    Raises:
        ValueError: not a size.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value, re.IGNORECASE)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{value!r} is not a size; write bytes or a number with KiB, MiB, GiB, KB, MB or GB")
    return math.floor(float(match[1]) * unit)


def format_size(size: int) -> str:
    """A size for people: "1 GiB", "1.5 MiB", "700 B"."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"


Size = Annotated[int, BeforeValidator(parse_size)]

MODEL, CACHE, ENGINE, SERVER = "Model", "KV cache", "Engine", "Server"


def _option(default: Any, help: str, panel: str, *, shown: str | None = None, **limits: Any) -> Any:  # noqa: A002
    """A field with its help. ``shown`` is how the help states a default that depends on the machine or the model."""
    return Field(default, description=help, json_schema_extra={"panel": panel, "shown": shown}, **limits)


_ONE_OF = (("kv_memory", "num_pages"), ("disk_cache", "no_disk_cache"))
"""Options of which one source may give only one."""


class Settings(BaseSettings):
    """The options. Made directly it knows only its arguments and the defaults; see ``load_settings``."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, validate_default=True, protected_namespaces=()
    )

    model: Path | None = _option(
        None, "A GGUF file or a Hugging Face folder.", MODEL, shown="the bundled SmolLM2-135M-Instruct"
    )
    served_model_name: str | None = _option(
        None, "The name clients ask for.", MODEL, shown="the file's or folder's name", min_length=1
    )
    weights: Literal["fp16", "fp32", "q8", "q4"] = _option(
        "q4", "Weights in memory: q8 rounds them to 8 bits; q4 too, but keeps what the file holds in 4 bits.", MODEL
    )
    chat_template: Path | None = _option(None, "A Jinja file to use for chats.", MODEL, shown="the model's own")
    cache_dir: Path | None = _option(
        None, "Folder for what is made once and kept (converted tokenizers).", MODEL, shown="~/.cache/pagetrie"
    )

    kv_memory: Size | None = _option(
        None, "Memory for keys and values, such as 2GiB. Not together with --num-pages.", CACHE, shown="1GiB", gt=0
    )
    num_pages: int | None = _option(
        None, "Pages in the pool, in place of --kv-memory.", CACHE, shown="what --kv-memory holds", gt=0
    )
    page_size: int = _option(16, "Tokens per page; a power of two up to 256.", CACHE, ge=1, le=256)
    kv_dtype: Literal["fp16", "fp32"] = _option("fp16", "Precision of keys and values.", CACHE)
    prefix_index: Literal["radix", "hash", "none"] = _option(
        "radix", "How stored prefixes are found: radix tree, chained hash, or no sharing at all.", CACHE
    )
    eviction: Literal["lru", "fifo", "lfu", "slru", "s3-fifo", "gdsf", "ttl", "adaptive"] = _option(
        "lru", "Which cached pages go first when room is needed; adaptive learns which will be asked for again.", CACHE
    )
    ram_cache: Size | None = _option(
        None, "Memory for pages that the pool had to give up, such as 4GiB.", CACHE, shown="none", gt=0
    )
    ram_codec: Literal["none", "int8", "k8v4"] = _option(
        "none",
        "How --ram-cache keeps pages: as they are; in 8 bits, 1.9 times as many; k8v4, 2.5 times. The last two round.",
        CACHE,
    )
    disk_cache: Path | None = _option(
        None,
        "Folder that keeps pages over restarts; one server at a time.",
        CACHE,
        shown="for serve, ~/.cache/pagetrie/pages",
    )
    disk_cap: Size = _option("4GiB", "Most bytes that the disk cache may take.", CACHE, gt=0)
    no_disk_cache: bool = _option(False, "Keep no pages on disk.", CACHE)
    store: str | None = _option(
        None,
        "Pages shared with other servers: redis://HOST (Valkey too), file:///FOLDER, s3://BUCKET/PREFIX, mooncake://HOST.",
        CACHE,
        shown="none",
        min_length=1,
    )
    store_secret: SecretStr | None = _option(
        None,
        "What all servers on a store have in common; better given as PAGETRIE_STORE_SECRET.",
        CACHE,
        shown="none",
        min_length=16,
    )
    encrypt_cache: bool = _option(
        False, "Encrypt pages on disk and in a store under their tenants' secrets; needs --api-keys.", CACHE
    )
    attention: Literal["auto", "native", "torch"] = _option(
        "auto", "What computes attention: native kernels, torch, or the kernels where they fit the model.", CACHE
    )
    kv_layout: Literal["paged", "contiguous"] = _option(
        "paged", "contiguous reserves the whole context for every sequence and shares nothing: the baseline.", CACHE
    )

    max_pinned: float = _option(
        0.5, "Share of the pool that contexts and pinned prefixes may keep from eviction.", CACHE, ge=0, le=1
    )

    tenant_floors: float = _option(
        0.25,
        "Part of the cache that tenants are guaranteed together, in equal parts; those with a floor of their own get "
        "that in addition.",
        CACHE,
        ge=0,
        le=1,
    )
    tenant_cap: float = _option(
        1.0, "Part of the cache that a tenant without a cap of its own may leave filled.", CACHE, ge=0, le=1
    )

    max_model_len: int | None = _option(
        None,
        "Longest prompt plus output, in tokens; at most the model's context and what the pool holds.",
        ENGINE,
        shown="the smaller of these two",
        ge=2,
    )
    max_num_seqs: int = _option(64, "Seats: sequences computed at a time.", ENGINE, ge=1, le=4096)
    max_num_batched_tokens: int = _option(
        512, "Token budget of a step; longer prompts are computed in chunks.", ENGINE, ge=1
    )
    max_queue: int = _option(1024, "Requests that may wait for a seat; more are refused (429).", ENGINE, ge=1)
    ageing_steps: int = _option(
        256,
        "Steps of waiting that are worth one level of priority; also how long smaller requests may pass one that "
        "doesn't fit yet.",
        ENGINE,
        ge=1,
    )
    max_bypass: int = _option(32, "How many requests may pass one that doesn't fit yet; 0 for none.", ENGINE, ge=0)
    max_contexts: int = _option(256, "Contexts that one client may keep; more are refused (429).", ENGINE, ge=1)
    threads: int | None = _option(None, "Threads that compute.", ENGINE, shown="the physical cores", ge=1, le=1024)
    seed: int | None = _option(None, "Seeds the requests that bring no seed of their own.", ENGINE, shown="random")

    host: str = _option("127.0.0.1", "Address to listen on.", SERVER, min_length=1)
    port: int = _option(8000, "Port to listen on; 0 takes a free one.", SERVER, ge=0, le=65535)
    api_keys: Path | None = _option(
        None,
        "The file of API keys and tenants that `pagetrie tenant` keeps. It is read again when it changes.",
        SERVER,
        shown="no keys: everybody is one tenant, and only this machine is listened to",
    )
    insecure: bool = _option(False, "Listen to other machines without API keys.", SERVER)
    max_body_size: Size = _option("8MiB", "Largest request body; larger ones are refused (413).", SERVER, gt=0)
    request_timeout: float = _option(
        60, "Seconds that a request may take to arrive; slower ones are refused (408).", SERVER, gt=0, le=86400
    )
    context_ttl: float = _option(
        600, "Seconds that a context lives after its last use, unless it was made with another number.", SERVER, gt=0
    )
    warm: Path | None = _option(
        None, "A JSONL file of prompts to compute, and perhaps pin, before the server is ready.", SERVER, shown="none"
    )
    public_prefix: Path | None = _option(
        None, "A JSONL file of prompts whose cached pages all tenants share.", SERVER, shown="nothing is shared"
    )
    shutdown_timeout: float = _option(
        30, "Seconds that running requests get to end after a stop signal.", SERVER, ge=0, le=86400
    )
    record: Path | None = _option(
        None,
        "File to record requests to, for pagetrie replay: times, lengths, keyed hashes, no text.",
        SERVER,
        shown="none",
    )
    stuck_after: float = _option(
        60, "Seconds without a step, while requests wait, from which /ready says no.", SERVER, gt=0, le=86400
    )
    access_log: Literal["plain", "json", "off"] = _option(
        "plain", "A line per request: plain in the log, json on standard output with token counts.", SERVER
    )
    otlp_traces_endpoint: str | None = _option(
        None,
        "Collector to send OpenTelemetry traces to, such as http://localhost:4318; needs pagetrie[trace].",
        SERVER,
        shown="OTEL_EXPORTER_OTLP_ENDPOINT; none",
        min_length=1,
    )
    log_level: Literal["debug", "info", "warning", "error"] = _option("info", "Least level to log.", SERVER)

    @field_validator("page_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"must be a power of two, got {value}")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 (the base class fixes the names)
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments only: ``load_settings`` lays the sources over each other, as it must know who said what."""
        return (init_settings,)


def fields() -> dict[str, FieldInfo]:
    """All options by name, in the order of the help."""
    return Settings.model_fields


def flag(name: str) -> str:
    """The command-line spelling of an option."""
    return "--" + name.replace("_", "-")


def load_settings(flags: Mapping[str, Any], config: Path | None = None, *, default_file: bool = True) -> Settings:
    """Lay flags over the environment over a TOML file over the defaults.

    Args:
        flags: options given by name; None counts as not given.
        config: the TOML file; if None, the one that ``PAGETRIE_CONFIG`` names.
        default_file: look for ``pagetrie.toml`` in the working directory if no file was named.

    Raises:
        ConfigError: an unknown option, a bad value, an unreadable file; says which and where it came from.
    """
    named = config or (Path(os.environ[f"{ENV_PREFIX}CONFIG"]) if os.environ.get(f"{ENV_PREFIX}CONFIG") else None)
    if named is None and default_file and DEFAULT_CONFIG.is_file():
        named = DEFAULT_CONFIG
    given = {name: value for name, value in flags.items() if value is not None}
    environment = {name: value for name, value in EnvSettingsSource(Settings)().items() if value != ""}
    file = _read_toml(named) if named is not None else {}
    _reject_unknown(given, "")
    _reject_unknown(file, f" in {named}")

    layers = (given, environment, file)
    merged: dict[str, Any] = {}
    for layer in layers:
        for pair in _ONE_OF:
            said = [name for name in pair if name in layer]
            if len(said) == 2:
                raise ConfigError(f"give either {_said(pair[0], layers, named)} or {pair[1]}, not both")
            # Both speak of the same thing, so the stronger source's word replaces the weaker one's.
            if said and any(name in merged for name in pair):
                layer = {name: value for name, value in layer.items() if name not in said}
        for name, value in layer.items():
            merged.setdefault(name, value)
    try:
        return Settings(**merged)
    except ValidationError as error:
        problems = []
        for detail in error.errors(include_url=False):
            name = str(detail["loc"][0])
            reason = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else detail["msg"]
            if detail["type"] != "value_error":
                reason = f"{reason[0].lower()}{reason[1:]}, got {detail['input']!r}"
            problems.append(f"{_said(name, layers, named)}: {reason}")
        raise ConfigError("; ".join(problems)) from error


def _said(name: str, layers: tuple[Mapping[str, Any], ...], file: Path | None) -> str:
    given, environment, _ = layers
    if name in given:
        return flag(name)
    if name in environment:
        return f"{ENV_PREFIX}{name.upper()}"
    return f"{name} in {file}"


def _reject_unknown(values: Mapping[str, Any], where: str) -> None:
    for name in values:
        if name not in Settings.model_fields:
            close = difflib.get_close_matches(name, Settings.model_fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"unknown option {name!r}{where}{hint}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"can't read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} is not valid TOML: {error}") from error
