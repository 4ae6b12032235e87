"""A real Prometheus scrapes a real server: what our dashboard file and those made for vLLM ask for has an answer."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server
from tests.e2e.test_tenants import POLICY, Keys
from tests.e2e.vllm_dashboards import QUERIES

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "docs" / "grafana" / "pagetrie.json").read_text())
ROUNDS = 400
"""How often each query is asked before it counts as unanswered."""


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_the_dashboard_file_is_well_formed() -> None:
    """What Grafana wants of a file to import: ids, places, and a data source to choose."""
    assert DASHBOARD["id"] is None and DASHBOARD["uid"] and DASHBOARD["title"] and DASHBOARD["schemaVersion"] >= 36
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    every = DASHBOARD["panels"]
    assert len({panel["id"] for panel in every}) == len(every) > 40
    taken: set[tuple[int, int]] = set()
    for panel in every:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["title"]
    for panel in panels():
        assert panel["description"] and panel["type"] in ("stat", "timeseries", "heatmap")
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        assert all(source["datasource"]["uid"] == "${datasource}" for source in (panel, *panel["targets"]))
    used = {name for text in expressions() for name in re.findall(r"\$(\w+)", text)}
    assert used <= variables.keys() | {"__rate_interval"}
    documented = (ROOT / "docs" / "observability.md").read_text()
    for name in {name for text in expressions() for name in re.findall(r"(?:vllm|pagetrie):\w+", text)}:
        assert f"`{re.sub('_(bucket|sum|count)$|(?<!iteration_tokens)_total$', '', name)}`" in documented, name


class Prometheus:
    """A Prometheus that scrapes one server twice a second."""

    def __init__(self, target: str, key: str, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
            "scrape_configs": [
                {
                    "job_name": "pagetrie",
                    "authorization": {"credentials": key},
                    "static_configs": [{"targets": [target]}],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [
                "prometheus",
                "--config.file=prometheus.yml",
                "--storage.tsdb.path=data",
                f"--web.listen-address={address}",
            ],
            cwd=folder,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        self.http = httpx.Client(base_url=f"http://{address}", timeout=30)

    def is_ready(self) -> bool:
        try:
            return self.http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            assert self.process.poll() is None, Path(self.log.name).read_text()
            return False

    def ask(self, query: str) -> list[float]:
        """The values of an instant query that are numbers."""
        answer = self.http.get("/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", (query, answer)
        result = answer["data"]["result"]
        return [value for value in (float(series["value"][1]) for series in result) if not math.isnan(value)]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys") / "keys.json")


@pytest.fixture(scope="module")
def server(start_lasting: Callable[..., Server], keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Server:
    keys.add("acme")
    options = ("--num-pages", "200", "--max-model-len", "1024", "--ram-cache", "16MiB", "--threads", "1")
    disk = str(tmp_path_factory.mktemp("pages"))
    return start_lasting("--api-keys", str(keys.path), "--disk-cache", disk, "--disk-cap", "64MiB", *options)


@pytest.fixture(scope="module")
def prometheus(server: Server, keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus here (Debian: apt-get install prometheus)")
    started = Prometheus(
        server.url.removeprefix("http://"), keys.add("ops", admin=True), tmp_path_factory.mktemp("prometheus")
    )
    try:
        yield started
    finally:
        started.process.terminate()
        started.process.wait(60)
        started.log.close()


@pytest.mark.slow
def test_every_query_is_answered_with_data(server: Server, keys: Keys, prometheus: Prometheus) -> None:
    """While two clients keep the server busy; a number for each query, not only NaN."""
    variables = {"__rate_interval": "10s", "model_name": server.model, "instance": ".*", "job": ".*", "engine": ".*"}

    def fill(query: str) -> str:
        return re.sub(r"\$(\w+)", lambda match: variables[match[1]], query)

    over = threading.Event()
    headers = {"authorization": f"Bearer {keys.add('acme')}"}

    def keep_busy(name: str) -> int:
        count = 0
        while not over.is_set():
            count += 1
            body = {"prompt": f"{POLICY} {name} {count}", "max_tokens": 24, "ignore_eos": True}
            server.http.post("/v1/completions", json=body, headers=headers).raise_for_status()
        return count

    unanswered = {fill(query) for query in (*expressions(), *QUERIES)}
    assert len(unanswered) > 100 and not any("$" in query for query in unanswered)
    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(keep_busy, name) for name in ("a", "b")]
        try:
            for _ in range(ROUNDS):
                if prometheus.is_ready():
                    unanswered = {query for query in unanswered if not prometheus.ask(query)}
                if not unanswered:
                    break
                assert not any(client.done() for client in clients), [client.exception() for client in clients]
        finally:
            over.set()
    assert not unanswered, sorted(unanswered)
    assert prometheus.ask('sum(pagetrie:tenant_prompt_tokens_total{tenant="acme"})')[0] > 0
    [pages] = prometheus.ask("sum(pagetrie:pages)")
    assert pages == 200
