"""The command line: ``pagetrie serve``, ``demo``, ``explain``, ``cache``, ``version``.

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
