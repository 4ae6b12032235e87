"""The command line: ``pagetrie serve``, ``demo``, ``top``, ``explain``, ``cache``, ``replay``, ``plan``, ``tenant``,
``version``.

Everything heavy is imported inside the commands, so that ``--help`` is quick.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pagetrie import __version__
from pagetrie.cli import cache
from pagetrie.cli.options import with_settings
from pagetrie.cli.tenant import commands as tenant_commands
from pagetrie.errors import ConfigError, ModelLoadError
from pagetrie.settings import CACHE, ENGINE, MODEL, SERVER, Settings, load_settings

app = typer.Typer(
    help="Serve language models over a paged, prefix-shared KV cache.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(cache.app, name="cache")


@app.command(
    help="Serve a model with the OpenAI API.\n\n"
    "Each setting can also be given as a variable (PAGETRIE_PORT=8123) or in a TOML file (port = 8123); "
    "a flag beats a variable, a variable beats the file."
)
@with_settings([MODEL, CACHE, ENGINE, SERVER])
def serve(**options: Any) -> None:
    """Serve a model with the OpenAI API."""
    settings = _settings(options)
    from pagetrie.cli.serve import serve as run_server

    run_server(settings)


@app.command()
@with_settings([MODEL, CACHE, ENGINE])
def demo(
    *,
    users: Annotated[int, typer.Option("--users", help="Users who share one system prompt.", min=1, max=1000)] = 50,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", help="Length of the system prompt, in tokens.", min=16)
    ] = 1000,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens to answer with, per user.", min=1)] = 32,
    **options: Any,
) -> None:
    """Show what sharing pages is worth: many users on one system prompt, against the contiguous baseline."""
    settings = _settings(options)
    from pagetrie.cli.demo import demo as run_demo

    run_demo(settings, users=users, prompt_tokens=prompt_tokens, max_tokens=max_tokens)


@app.command()
def top(
    *,
    url: Annotated[str, typer.Option("--url", help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="An admin's API key.", envvar="PAGETRIE_API_KEY", metavar="KEY")
    ] = None,
    interval: Annotated[float, typer.Option("--interval", help="Seconds between looks.", min=0.1, max=3600.0)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and print it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, an object per look.")] = False,
) -> None:
    """Watch a running server: requests, pages, hits, prefixes. Without a terminal, a line per look."""
    from pagetrie.cli.top import top as run_top

    run_top(url, api_key, interval, once=once, as_json=as_json)


app.add_typer(tenant_commands, name="tenant")


@app.command()
@with_settings([MODEL], positional=False)
def explain(
    *,
    first: Annotated[Path, typer.Argument(help="The body of a request, as JSON.", metavar="A.json")],
    second: Annotated[Path, typer.Argument(help="The body of a later one.", metavar="B.json")],
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
    **options: Any,
) -> None:
    """Say how much of one request's prompt another one would find in the cache, and why no more."""
    settings = _settings(options)
    from pagetrie.cli.explain import explain as run_explain
    from pagetrie.cli.explain import show

    found = run_explain(settings, first, second)
    print(json.dumps(found, ensure_ascii=False, indent=2) if as_json else show(found))


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="A trace: Mooncake's, Bailian's, vLLM's timed one, or a recorded one.")],
    *,
    index_only: Annotated[bool, typer.Option("--index-only", help="Only count hits; no engine, no times.")] = False,
    capacity: Annotated[
        list[int] | None,
        typer.Option("--capacity", help="Pages (of the trace's size) per replica; can be repeated.", min=1),
    ] = None,
    eviction: Annotated[
        list[str] | None, typer.Option("--eviction", help="Policy; can be repeated; all for all of them.")
    ] = None,
    replicas: Annotated[int, typer.Option("--replicas", help="Replicas, each with its own pool.", min=1, max=256)] = 1,
    routing: Annotated[str, typer.Option("--routing", help="round-robin, least-loaded or prefix.")] = "prefix",
    ram_cache: Annotated[str | None, typer.Option("--ram-cache", help="Memory below each pool, such as 64GiB.")] = None,
    ram_codec: Annotated[
        str, typer.Option("--ram-codec", help="How that memory keeps pages: none (as they are), int8 or k8v4.")
    ] = "none",
    disk_cap: Annotated[str | None, typer.Option("--disk-cap", help="Disk below each pool, such as 1TB.")] = None,
    ram_bandwidth: Annotated[
        str, typer.Option("--ram-bandwidth", help="Between pool and memory, per second.")
    ] = "20GB",
    disk_bandwidth: Annotated[str, typer.Option("--disk-bandwidth", help="Of the disk, per second.")] = "3GB",
    prefix_index: Annotated[str, typer.Option("--prefix-index", help="radix or hash.")] = "radix",
    page_tokens: Annotated[
        int | None, typer.Option("--page-tokens", help="Tokens per page id, if not the format's usual number.", min=1)
    ] = None,
    requests: Annotated[int | None, typer.Option("--requests", help="Replay only so many, the first.", min=1)] = None,
    model: Annotated[str, typer.Option("--model", help="Shape to reckon with; see pagetrie plan.")] = "llama-3.1-8b",
    device: Annotated[str, typer.Option("--device", help="Device to reckon with; see pagetrie plan.")] = "h100-80gb",
    devices: Annotated[int, typer.Option("--devices", help="Of them, per replica.", min=1, max=1024)] = 1,
    weights: Annotated[str, typer.Option("--weights", help="Format of the weights; see pagetrie plan.")] = "bf16",
    step_cost: Annotated[
        str | None,
        typer.Option("--step-cost", help="Seconds per step, token and attended pair, in place of model and device."),
    ] = None,
    page_size: Annotated[
        int | None, typer.Option("--page-size", help="Tokens per page of the replayed cache.", min=1)
    ] = None,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Seats per replica.", min=1)] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", help="Token budget of a step.", min=1)
    ] = 2048,
    slo_ttft: Annotated[float, typer.Option("--slo-ttft", help="Seconds that a good first token takes at most.")] = 2.0,
    slo_tpot: Annotated[float, typer.Option("--slo-tpot", help="Seconds that a good later one takes at most.")] = 0.1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw charts into this SVG file; - for bars in the terminal.")
    ] = None,
) -> None:
    """Replay a trace: hit rates, and with the real scheduler under a virtual clock, times, goodput and preemptions."""
    from pagetrie.cli import replay as command
    from pagetrie.cli.plan import cost_model, ram_share, token_bytes
    from pagetrie.replay.trace import read_trace

    if prefix_index not in ("radix", "hash"):
        raise ConfigError(f"no prefix index {prefix_index!r}; there are radix and hash")
    read = read_trace(trace, page_tokens=page_tokens)
    del read.requests[requests if requests is not None else len(read.requests) :]
    if ram_codec != "none" and ram_cache is None:
        raise ConfigError(f"--ram-codec {ram_codec} needs --ram-cache")
    tiers = command.read_tiers(ram_cache, disk_cap, ram_bandwidth, disk_bandwidth, ram_share(model, ram_codec))
    fleet = command.Fleet(
        capacities=capacity or [10_000],
        policies=command.check_policies(eviction or ["lru"], bound=index_only),
        index=prefix_index,
        replicas=replicas,
        routing=command.check_routing(routing),
        tiers=tiers,
        token_bytes=token_bytes(model) if tiers else 0,
    )
    if index_only:
        command.replay_hits(read, fleet, as_json=as_json, file=plot)
        return
    from pagetrie.replay.engine import ReplicaOptions

    options = ReplicaOptions(
        num_pages=1,
        page_size=page_size or read.page_tokens,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    cost = cost_model(model, device, devices, weights, step_cost)
    command.replay_times(read, fleet, options, cost, command.Slo(slo_ttft, slo_tpot), as_json=as_json, file=plot)


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="A known shape, a config.json, a folder or a GGUF file.")
    ] = "smollm2-135m",
    *,
    device: Annotated[str, typer.Option("--device", help="A known device; this for this machine, measured.")] = "this",
    devices: Annotated[int, typer.Option("--devices", help="How many of them.", min=1, max=1024)] = 1,
    weights: Annotated[str, typer.Option("--weights", help="Format of the weights.")] = "bf16",
    weight_bytes: Annotated[
        str | None, typer.Option("--weight-bytes", help="Size of the weights, such as 38GB, if known.")
    ] = None,
    prompt: Annotated[int, typer.Option("--prompt", help="Median prompt, in tokens.", min=1)] = 2000,
    output: Annotated[int, typer.Option("--output", help="Median answer, in tokens.", min=1)] = 300,
    spread: Annotated[float, typer.Option("--spread", help="Spread of the lengths (sigma of their log).")] = 0.8,
    shared: Annotated[int, typer.Option("--shared", help="Tokens that all prompts begin with.", min=0)] = 0,
    context: Annotated[
        int | None, typer.Option("--context", help="Longest sequence; the model's if not given.", min=2)
    ] = None,
    page_size: Annotated[int, typer.Option("--page-size", help="Tokens per page.", min=1)] = 16,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", help="Sequences at once, for TPOT; can be repeated.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw charts into this SVG file; - for bars in the terminal.")
    ] = None,
) -> None:
    """Size a machine on paper: what fits, how fast it can be at best, and what a miss costs."""
    from pagetrie.cli import plan as command

    question = command.Question(
        model=model,
        device=device,
        devices=devices,
        weights=weights,
        weight_bytes=None if weight_bytes is None else command.read_size(weight_bytes),
        prompt=prompt,
        output=output,
        spread=spread,
        shared=shared,
        context=context,
        page_size=page_size,
        batches=tuple(batch or (1, 16, 64)),
    )
    command.plan(question, as_json=as_json, file=plot)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _settings(options: dict[str, Any]) -> Settings:
    config = options.pop("config")
    return load_settings(options, config)


def run() -> None:
    """The console script: errors that a person can act on become one line on stderr and exit code 1."""
    try:
        app(prog_name="pagetrie")
    except (ConfigError, ModelLoadError) as error:
        print(f"pagetrie: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
