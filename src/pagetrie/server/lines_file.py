"""Files of one JSON object per line that an operator gives the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pagetrie.errors import ConfigError, InvalidRequestError

T = TypeVar("T")


def read_lines(path: Path, what: str, parse: Callable[[int, bytes], T]) -> list[T]:
    """What ``parse`` makes of each line's number, from 1, and bytes; empty lines are left out.

    Args:
        path: the file.
        what: its name in errors ("warm-up file").
        parse: raises InvalidRequestError for a line that makes no sense.

    Raises:
        ConfigError: the file can't be read, or a line makes no sense; says which.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"can't read the {what} {path}: {error.strerror}") from error
    parsed = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                parsed.append(parse(number, line))
            except InvalidRequestError as error:
                raise ConfigError(f"line {number} of the {what} {path}: {error.message}") from error
    return parsed
