"""``pagetrie top``: a running server in the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pagetrie.cli.charts import console as make_console
from pagetrie.cli.top_sample import NoAnswerError, Server
from pagetrie.cli.top_view import line, screen

_OTHER_LINES = 26
"""Of a screen, those that aren't requests."""


class Top:
    """Looks at a server again and again.

    Args:
        server: which.
        interval: seconds between looks.
        console: where to show it.
        sleep: waits so many seconds.

    Raises:
        NoAnswerError: the first look fails.
    """

    def __init__(
        self, server: Server, interval: float, console: Console, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._server = server
        self._interval = interval
        self._console = console
        self._sleep = sleep
        self._rates: dict[str, float] = {}
        self._problem = ""
        self._latest = server.look()

    def _look(self) -> bool:
        """Look again; False if there was nothing new."""
        try:
            sample = self._server.look()
        except NoAnswerError as error:
            self._problem = str(error)
            return False
        self._problem = ""
        if sample.time == self._latest.time:
            return False
        self._rates = sample.rates(self._latest)
        self._latest = sample
        return True

    def once(self, *, as_json: bool) -> None:
        """Show it as it is now, all in one."""
        if as_json:
            self._print_json()
        else:
            self._console.print(screen(self._latest, {}, len(self._latest.frame["requests"])))

    def lines(self, *, as_json: bool) -> None:
        """A line per look, for as long as there is somebody to read it."""
        show = self._print_json if as_json else self._print_line
        show()
        while True:
            self._sleep(self._interval)
            if self._look():
                show()
            elif self._problem:
                self._console.print(self._problem, markup=False, highlight=False, soft_wrap=True)

    def live(self) -> None:
        """The whole screen, until interrupted."""
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            while True:
                rows = max(4, self._console.height - _OTHER_LINES)
                live.update(screen(self._latest, self._rates, rows, self._problem), refresh=True)
                self._sleep(self._interval)
                self._look()

    def _print_line(self) -> None:
        self._console.print(Text(line(self._latest, self._rates)), soft_wrap=True)

    def _print_json(self) -> None:
        sample = self._latest
        told = {
            **sample.frame,
            "rates": self._rates,
            "totals": sample.totals,
            "finished": sample.finished,
            "tenants": sample.tenants,
        }
        # Not through rich, which would wrap it.
        print(json.dumps(told, ensure_ascii=False), file=self._console.file, flush=True)


def top(url: str, key: str | None, interval: float, *, once: bool, as_json: bool) -> None:
    """Show a server once, or until interrupted: a screen in a terminal, lines elsewhere.

    Raises:
        NoAnswerError: it doesn't answer.
    """
    console = make_console()
    shown = Top(Server(url, key), interval, console)
    if once:
        shown.once(as_json=as_json)
    elif as_json or not console.is_terminal:
        shown.lines(as_json=as_json)
    else:
        shown.live()
