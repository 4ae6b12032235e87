"""What a person at a terminal sees and presses while a batch runs."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bar() -> Progress | None:
    """A bar on stderr, or None where no terminal would show it."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        return None
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


@contextmanager
def between_steps() -> Iterator[Any]:
    """Hold Ctrl-C back until the running step has ended, so that the engine's books always balance.

    Yields a function that raises KeyboardInterrupt if one came. A second Ctrl-C isn't held back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # signals go to the main thread
        return
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler:
        yield lambda: None  # somebody else decides what Ctrl-C means
        return
    pressed = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            signal.default_int_handler(number, frame)
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)
    check()
