"""The dashboard in a real browser, on a real server that eight agents with one trunk are asking.

``PAGETRIE_SCREENSHOTS=docs/images`` keeps the pictures that the documentation shows.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe_api = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")

TRUNK = "You are one of eight agents that plan a garden. Keep to the rules that all of you share. " * 8
TOPICS = ("roses", "beans", "apple trees", "a pond", "bees", "compost", "a fence", "a shed")
SCREENSHOTS = os.environ.get("PAGETRIE_SCREENSHOTS")


class Agent:
    """One streamed request, until it ends or is cancelled."""

    def __init__(self, server: Server, topic: str) -> None:
        self.topic = topic
        self._begun = threading.Event()
        self._leave = threading.Event()
        self.id = ""
        self._thread = threading.Thread(target=self._run, args=(server,), daemon=True)
        self._thread.start()

    def _run(self, server: Server) -> None:
        body = {"prompt": f"{TRUNK}Your part: {self.topic}.", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as response:
            self.id = response.headers["x-request-id"]
            for _ in response.iter_lines():
                self._begun.set()
                if self._leave.is_set():
                    return

    def begun(self) -> None:
        assert self._begun.wait(120)

    def cancel(self) -> None:
        self._leave.set()
        self._thread.join(60)


@pytest.fixture(scope="module")
def server(start_lasting: Callable[..., Server]) -> Server:
    return start_lasting("--num-pages", "700", "--max-model-len", "2048", "--no-disk-cache")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any, server: Server) -> Iterator[Callable[..., Any]]:
    contexts: list[Any] = []
    faults: list[str] = []

    def open_page(**options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.goto(f"{server.url}/dashboard")
        page.wait_for_selector("html[data-frames]", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not faults


def next_frame(page: Any, frames: int = 2) -> None:
    """Wait until the page shows something taken after now."""
    for _ in range(frames):
        seen = page.evaluate("document.documentElement.dataset.frames")
        page.wait_for_selector(f'html:not([data-frames="{seen}"])', state="attached")


def counts(page: Any) -> dict[str, int]:
    """Cells of the map by state, as the page counted them."""
    cells = page.locator("#map-legend li").evaluate_all("all => all.map(x => [x.dataset.key, Number(x.dataset.count)])")
    return dict(cells)


def no_serious_fault(page: Any) -> None:
    found = axe_api.Axe().run(page).response["violations"]
    serious = [(fault["id"], [node["html"][:200] for node in fault["nodes"][:3]]) for fault in found
               if fault["impact"] in ("serious", "critical")]  # fmt: skip
    assert not serious


def keep(page: Any, name: str, **options: Any) -> None:
    if SCREENSHOTS:
        page.screenshot(path=Path(SCREENSHOTS) / name, **options)


def test_eight_agents_on_one_trunk(server: Server, open_page: Callable[..., Any]) -> None:
    page = open_page(viewport={"width": 1040, "height": 900}, color_scheme="light")
    first = Agent(server, TOPICS[0])
    first.begun()
    agents = [first, *(Agent(server, topic) for topic in TOPICS[1:])]
    try:
        for agent in agents:
            agent.begun()
        next_frame(page)
        page.wait_for_selector('#tree g[data-children="8"]')
        trunk = page.locator('#tree g[data-children="8"]')
        assert trunk.count() == 1 and page.locator("#tree g").count() == 9
        assert "in use, 8 ends below" in trunk.get_attribute("aria-label")
        assert page.locator('#requests tr[data-state="decode"]').count() == 8
        cells = counts(page)
        assert sum(cells.values()) == 700 and cells["active"] > 0
        no_serious_fault(page)

        # The one that leaves gives its pages back: its branch is merely cached, the trunk and the others stay.
        agents[3].cancel()
        page.wait_for_selector(f'#requests tr[data-id="{agents[3].id}-0"][data-state="abort"][data-pages="0"]')
        next_frame(page)
        in_use = page.locator('#tree g[aria-label*="in use"]').count()
        branch = page.locator(f'#tree g[aria-label*="{TOPICS[3]}"]')
        assert in_use == 8 and "cached" in branch.get_attribute("aria-label")

        # By keyboard: into the branches, zoomed in, and out again.
        page.locator('#tree g[tabindex="0"]').focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        page.wait_for_selector('#tree g[aria-selected="true"]')
        assert page.locator("#edge dd").count() >= 6
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("Enter")
        assert page.locator("#crumbs button").count() == 2
        page.keyboard.press("Escape")
        assert page.locator("#crumbs button").count() == 0

        page.fill("#query", "apple trees")
        page.press("#query", "Enter")
        page.wait_for_selector("#tree g.found")
        assert page.locator("#tree g.found").count() == 1
        assert "apple trees" in page.locator("#search-result").inner_text()
        page.fill("#query", "zebra crossing")
        page.press("#query", "Enter")
        page.get_by_text("0 found").wait_for()
        page.fill("#query", "")
        page.press("#query", "Enter")
        keep(page, "dashboard.png", full_page=True)

        phone = open_page(viewport={"width": 390, "height": 844}, color_scheme="dark", has_touch=True, is_mobile=True)
        next_frame(phone)
        assert phone.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        for by in ("sharing", "owner", "state"):
            phone.select_option("#map-by", by)
            assert sum(counts(phone).values()) == 700
        no_serious_fault(phone)
        keep(phone, "dashboard-phone.png")
    finally:
        for agent in agents:
            agent.cancel()

    metrics = server.idle()
    next_frame(page)
    for state, count in counts(page).items():
        assert count == metrics[f'pagetrie:pages{{state="{state}"}}'], state
    assert counts(page)["active"] == 0


def test_who_is_somewhere_else_sees_nothing(server: Server) -> None:
    for path in ("/dashboard", "/dashboard/app.js", "/v1/admin/live", "/v1/admin/live/events"):
        answer = server.http.get(path, headers={"host": "rebound.example.com"})
        assert answer.status_code == 403
    page = server.http.get("/dashboard")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert server.http.get("/dashboard/other.js").status_code == 404
