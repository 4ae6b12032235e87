"""Command-line options made from the settings, so that name, type, default and help exist in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from rich.markup import escape

from pagetrie import settings

_METAVARS: dict[Any, str] = {int: "N", float: "N", str: "TEXT", Path: "PATH"}


def with_settings(
    panels: Sequence[str], *, positional: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: its ``options`` keywords become a MODEL argument, --config and one flag per setting.

    The command's own keyword-only parameters stay as they are. What isn't given arrives as None.

    Args:
        panels: the groups of settings to offer, in the order of the help.
        positional: MODEL is an argument; else it's the option --model.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        made = [_parameter("model", Annotated[Path | None, _model_argument()])] if positional else []
        for name, field in settings.fields().items():
            if (name != "model" or not positional) and _extra(field)["panel"] in panels:
                made.append(_parameter(name, _annotation(name, field)))
        help_text = "A TOML file with settings, named as the flags are but with underscores."
        config = typer.Option(
            "--config", help=_with_default(help_text, "./pagetrie.toml if there is one"), metavar="FILE"
        )
        made.append(_parameter("config", Annotated[Path | None, config]))
        command.__signature__ = inspect.Signature([*made[:positional], *own, *made[positional:]])  # type: ignore[attr-defined]
        command.__annotations__ = {}
        return command

    return decorate


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _model_argument() -> Any:
    field = settings.fields()["model"]
    text = _with_default(field.description or "", _extra(field)["shown"])
    return typer.Argument(help=text, show_default=False, metavar="MODEL")


def _annotation(name: str, field: FieldInfo) -> Any:
    kind = _plain_type(field)
    shown = _extra(field)["shown"] or field.default
    if kind is bool:
        switch = typer.Option(
            settings.flag(name), help=escape(field.description or ""), rich_help_panel=_extra(field)["panel"]
        )
        return Annotated[bool | None, switch]
    option = typer.Option(
        settings.flag(name),
        help=_with_default(field.description or "", shown),
        rich_help_panel=_extra(field)["panel"],
        show_default=False,
        metavar="SIZE" if _is_size(field) else _METAVARS.get(kind),
    )
    return Annotated[(str if _is_size(field) else kind) | None, option]


def _plain_type(field: FieldInfo) -> Any:
    """The field's type without None."""
    annotation = field.annotation
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if annotation is SecretStr:
        return str
    if annotation is bool or annotation in _METAVARS or get_origin(annotation) is Literal:
        return annotation
    raise TypeError(f"no command-line form for {annotation!r}")


def _is_size(field: FieldInfo) -> bool:
    metadata = [*field.metadata, *(m for part in get_args(field.annotation) for m in getattr(part, "__metadata__", ()))]
    return any(getattr(item, "func", None) is settings.parse_size for item in metadata)


def _extra(field: FieldInfo) -> dict[str, Any]:
    extra = field.json_schema_extra
    if not isinstance(extra, dict):
        raise TypeError("a setting needs a panel; make it with settings._option")
    return extra


def _with_default(text: str, default: Any) -> str:
    return f"{escape(text)} [dim]{escape(f'[default: {default}]')}[/dim]"
