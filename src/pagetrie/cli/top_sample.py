"""One look at a running server over HTTP: its live frame, and the counts of /metrics that the frame lacks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families

from pagetrie.errors import ConfigError

LIVE, METRICS = "/v1/admin/live", "/metrics"
_MAX_BYTES = 64 << 20
_TENANT = "pagetrie:tenant_"
_TOTALS = {
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prompt_tokens_cached_total": "cached_tokens",
    "process_resident_memory_bytes": "memory_bytes",
    "process_start_time_seconds": "started",
}


class NoAnswerError(ConfigError):
    """The server didn't answer, or not with what was asked for."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment of a server.

    Attributes:
        frame: as ``/v1/admin/live`` has it.
        totals: ``prompt_tokens`` and ``cached_tokens`` since the start, ``memory_bytes``, ``started`` (seconds since
            the epoch).
        finished: choices by how they ended, since the start.
        tenants: by tenant, what ``pagetrie:tenant_*`` says (``in_flight``, ``active_pages``, ``cached_pages``, counts
            since the start); empty without API keys.
    """

    frame: dict[str, Any]
    totals: dict[str, float] = field(default_factory=dict)
    finished: dict[str, float] = field(default_factory=dict)
    tenants: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def time(self) -> float:
        """When, in seconds since the epoch, by the server's clock."""
        return float(self.frame["server"]["time"])

    def rates(self, before: Sample) -> dict[str, float]:
        """Tokens and finished choices per second since an earlier sample; nothing to go by gives nothing."""
        seconds = self.time - before.time
        if seconds <= 0:
            return {}
        load, earlier = self.frame["load"], before.frame["load"]
        changes = {
            "prefill_tokens": load["prefill_tokens"] - earlier["prefill_tokens"],
            "generated_tokens": load["generated_tokens"] - earlier["generated_tokens"],
            "finished": sum(self.finished.values()) - sum(before.finished.values()),
        }
        if min(changes.values()) < 0:  # it has been started anew
            return {}
        return {name: round(change / seconds, 3) for name, change in changes.items()}


class Server:
    """A server to look at.

    Args:
        url: its address, such as ``http://127.0.0.1:8000``.
        key: an admin's API key, where it has keys.
        timeout: seconds to wait for an answer.

    Raises:
        NoAnswerError: the address is no http or https URL.
    """

    def __init__(self, url: str, key: str | None = None, timeout: float = 10.0) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise NoAnswerError(f"{url!r} is no http:// or https:// URL")
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._timeout = timeout

    def look(self) -> Sample:
        """How it is now.

        Raises:
            NoAnswerError: says why.
        """
        try:
            frame = json.loads(self._get(LIVE))
            if "server" not in frame or "load" not in frame:
                raise ValueError("not a frame")
            text = self._get(METRICS).decode()
            return _sample(frame, text)
        except (ValueError, TypeError, KeyError) as error:
            raise NoAnswerError(f"{self.url} answers, but not as pagetrie does ({error})") from error

    def _get(self, path: str) -> bytes:
        request = Request(self.url + path, headers=self._headers)  # noqa: S310 - the scheme was checked
        try:
            with urlopen(request, timeout=self._timeout) as answer:  # noqa: S310
                body: bytes = answer.read(_MAX_BYTES)
                return body
        except HTTPError as error:
            raise NoAnswerError(_refusal(self.url + path, error)) from error
        except (OSError, URLError) as error:
            raise NoAnswerError(f"no answer from {self.url}: {getattr(error, 'reason', error)}") from error


def _refusal(url: str, error: HTTPError) -> str:
    if error.code in (401, 403):
        try:
            why = json.loads(error.read(65536))["error"]["message"]
        except (ValueError, TypeError, KeyError):
            why = "it needs an admin key"
        return f"{url} refuses: {why} (an admin's key goes into --api-key or PAGETRIE_API_KEY)"
    return f"{url} answers {error.code}; is this a pagetrie server?"


def _sample(frame: dict[str, Any], metrics: str) -> Sample:
    sample = Sample(frame)
    for family in text_string_to_metric_families(metrics):
        for name, labels, value, *_ in family.samples:
            if name in _TOTALS:
                sample.totals[_TOTALS[name]] = value
            elif name == "vllm:request_success_total":
                sample.finished[labels["finished_reason"]] = value
            elif name.startswith(_TENANT) and not name.endswith("_created"):
                count = name.removeprefix(_TENANT).removesuffix("_total")
                if "state" in labels:
                    count = f"{labels['state']}_{count}"
                sample.tenants.setdefault(labels["tenant"], {})[count] = value
    return sample
