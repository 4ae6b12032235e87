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

from pagetrie.server import keys_file
from tests.e2e.conftest import Server

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe_api = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")]

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
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    contexts: list[Any] = []
    faults: list[str] = []

    def note(message: Any) -> None:
        # A browser logs each refusal of a key, which the page expects.
        if message.type == "error" and "the server responded with a status of 40" not in message.text:
            faults.append(message.text)

    def open_page(server: Server, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", note)
        page.goto(f"{server.url}/dashboard")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not faults


def next_frame(page: Any, frames: int = 2) -> None:
    """Wait until the page shows something taken after now."""
    for _ in range(frames):
        seen = page.evaluate("document.documentElement.dataset.frames ?? 0")
        page.wait_for_selector(f'html:not([data-frames="{seen}"])', state="attached")


def counts(page: Any) -> dict[str, int]:
    """Cells of the map by state, as the page counted them."""
    cells = page.locator("#map-legend li").evaluate_all("all => all.map(x => [x.dataset.key, Number(x.dataset.count)])")
    return dict(cells)


PAGES = """() => ({
  active: Number(document.querySelector('#map-legend [data-key="active"]').dataset.count),
  running: [...document.querySelectorAll('#requests tr[data-state="decode"]')].map(row => Number(row.dataset.pages)),
  trunk: Number(document.querySelector('#tree g[data-children="8"]').dataset.tokens) / 16,
})"""


def shared_once(page: Any, agents: int) -> None:
    """The pages in use are those of the running agents and no others, the trunk's counted once."""
    seen = page.evaluate(PAGES)
    assert len(seen["running"]) == agents
    assert seen["active"] == sum(seen["running"]) - (agents - 1) * seen["trunk"]
    assert 0 < seen["trunk"] < min(seen["running"])


def map_equals(page: Any, metrics: dict[str, float]) -> None:
    next_frame(page)
    for state, count in counts(page).items():
        assert count == metrics[f'pagetrie:pages{{state="{state}"}}'], state


def no_serious_fault(page: Any) -> None:
    found = axe_api.Axe().run(page).response["violations"]
    serious = [(fault["id"], [node["html"][:200] for node in fault["nodes"][:3]]) for fault in found
               if fault["impact"] in ("serious", "critical")]  # fmt: skip
    assert not serious


def keep(page: Any, name: str, **options: Any) -> None:
    if SCREENSHOTS:
        page.screenshot(path=Path(SCREENSHOTS) / name, **options)


def test_eight_agents_on_one_trunk(server: Server, open_page: Callable[..., Any]) -> None:
    page = open_page(server, viewport={"width": 980, "height": 900}, color_scheme="light")
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
        assert sum(counts(page).values()) == 700
        shared_once(page, 8)
        no_serious_fault(page)

        # The one that leaves gives its pages back: its branch is merely cached, the trunk and the others stay.
        agents[3].cancel()
        page.wait_for_selector(f'#requests tr[data-id="{agents[3].id}-0"][data-state="abort"][data-pages="0"]')
        next_frame(page)
        in_use = page.locator('#tree g[aria-label*="in use"]').count()
        branch = page.locator(f'#tree g[aria-label*="{TOPICS[3]}"]')
        assert in_use == 8 and "cached" in branch.get_attribute("aria-label")
        shared_once(page, 7)

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
        fresh = open_page(server, viewport={"width": 960, "height": 900}, color_scheme="light")
        next_frame(fresh)
        keep(fresh, "dashboard.png", full_page=True)

        phone = open_page(
            server, viewport={"width": 390, "height": 844}, color_scheme="dark", has_touch=True, is_mobile=True
        )
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

    map_equals(page, server.idle())
    assert counts(page)["active"] == 0
    server.http.post("/v1/contexts", json={"prompt": TRUNK}).raise_for_status()
    map_equals(page, server.metrics())
    assert counts(page)["active"] > 0

    # Paused, the page lets the server alone.
    page.click("#pause")
    seen = page.evaluate("document.documentElement.dataset.frames")
    next_frame(phone)
    assert page.evaluate("document.documentElement.dataset.frames") == seen
    page.click("#pause")
    next_frame(page)


def test_an_admin_key_opens_the_page_and_no_other(
    start_lasting: Callable[..., Server], tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    keys = tmp_path / "keys.json"
    made = {}
    with keys_file.editing(keys) as file:
        for name in ("acme", "ops"):
            file.tenants[name] = keys_file.new_tenant()
            made[name] = keys_file.add_key(file, name, admin=name == "ops")[1]
    server = start_lasting("--num-pages", "200", "--max-model-len", "1024", "--no-disk-cache", "--api-keys", str(keys))
    for name, prompt in (("acme", "A secret of Acme's, which is nobody's business."), ("ops", "Ops wrote this.")):
        body = {"prompt": prompt, "max_tokens": 1}
        answer = server.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {made[name]}"})
        answer.raise_for_status()

    page = open_page(server, viewport={"width": 800, "height": 700}, color_scheme="dark")
    page.wait_for_selector("#key:focus")
    no_serious_fault(page)
    for key, answer in (("wrong", "Incorrect API key provided."), (made["acme"], "This needs an admin key.")):
        page.fill("#key", key)
        page.press("#key", "Enter")
        page.get_by_text(answer).wait_for()
        assert not page.locator("#view").is_visible()
    page.fill("#key", made["ops"])
    page.press("#key", "Enter")
    page.wait_for_selector('#tree g[aria-label*="Ops wrote this"]')
    assert not page.locator("#entry").is_visible()
    labels = page.locator("#tree g").evaluate_all("all => all.map(edge => edge.getAttribute('aria-label'))")
    assert sum("acme" in label and "isn't yours to see" in label for label in labels) == 1
    page.select_option("#map-by", "owner")
    assert {"acme", "ops", "free"} == counts(page).keys()
    assert page.locator("#requests .tenant").all_inner_texts() == ["Tenant", "acme", "ops"]
    for text, found in (("secret of", "0 found"), ("wrote", "1 found")):
        page.fill("#query", text)
        page.press("#query", "Enter")
        page.get_by_text(found).wait_for()
    assert "secret of Acme" not in page.content()
    no_serious_fault(page)

    page.reload()  # the tab still knows the key
    page.wait_for_selector('#tree g[aria-label*="Ops wrote this"]')
    page.click("#forget")
    page.wait_for_selector("#key:focus")
    assert "Ops wrote this" not in page.content() and page.evaluate("sessionStorage.length") == 0
