"""What each tenant has in flight and has used, and when that is too much."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagetrie.engine.tenant import Tenant
from pagetrie.kv.shares import OwnedPages
from pagetrie.server.auth import Caller
from pagetrie.server.errors import RateLimitError

MINUTE = 60.0
OTHERS = "(others)"
"""Stands for public pages, the server's own, and what is left of tenants that are no more; no tenant is called so."""


@dataclass(slots=True)
class _Account:
    """A tenant's numbers. ``tokens`` is what is left in the bucket, as of ``time``; it may be less than nothing."""

    tokens: float
    time: float
    in_flight: int = 0
    admitted: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Ticket:
    """Leave for some prompts to be in flight. Made by ``Quotas.admit``."""

    def __init__(self, account: _Account, prompts: int) -> None:
        self._account = account
        self._prompts = prompts
        self._open = True

    def close(self, *, cached: int = 0, completion: int = 0) -> None:
        """They are not any more; these were their tokens. Idempotent."""
        if self._open:
            self._open = False
            self._account.in_flight -= self._prompts
            self._account.tokens -= completion
            self._account.cached_tokens += cached
            self._account.completion_tokens += completion


class Quotas(Collector):
    """The tenants' accounts, and metrics of them.

    Tokens per minute are a bucket that holds a minute's worth. A request is admitted if its prompt is in the bucket (or
    the bucket is full), and takes it out; what it generates is taken out when it ends, below nothing if need be. So no
    tenant gets more than its rate over time, plus one minute's worth and what it had in flight. Tokens found in the
    cache count like others.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._pages: dict[str, OwnedPages] = {}

    def check(self, caller: Caller) -> None:
        """Refuse a caller that is at a limit already, before any work is done for it. Raises RateLimitError."""
        self._check(caller, 1, 0)

    def admit(self, caller: Caller, prompts: int, tokens: int) -> Ticket:
        """Take in prompts with so many tokens together. Raises RateLimitError."""
        account = self._check(caller, prompts, tokens)
        account.in_flight += prompts
        account.admitted += prompts
        account.tokens -= tokens
        account.prompt_tokens += tokens
        return Ticket(account, prompts)

    def _check(self, caller: Caller, prompts: int, tokens: int) -> _Account:
        limits, now = caller.limits, self._clock()
        account = self._accounts.get(caller.tenant.name)
        rate = limits.tokens_per_minute
        if account is None:
            account = self._accounts[caller.tenant.name] = _Account(math.inf, now)
        # Without a rate nothing is counted, so that whoever gets one later begins with a full bucket.
        refilled = account.tokens + (now - account.time) * (rate or 0) / MINUTE
        account.tokens = math.inf if rate is None else min(rate, refilled)
        account.time = now
        most = limits.max_requests
        if most is not None and account.in_flight + prompts > most:
            account.refused += 1
            more = f" and this one brings {prompts}" if prompts > 1 else ""
            raise RateLimitError(
                f"You may have {most} prompts in flight and have {account.in_flight}{more}; wait for some to end.", 1
            )
        if rate is not None:
            wanted = min(max(tokens, 1), rate)
            if account.tokens < wanted:
                account.refused += 1
                wait = (wanted - account.tokens) * MINUTE / rate
                raise RateLimitError(
                    f"You may use {rate} tokens per minute and have {max(0, int(account.tokens))} left now, but this "
                    f"takes {tokens or 'more'}; try again in {ceil(wait)} s.",
                    wait,
                )
        return account

    def note_pages(self, owners: Mapping[bytes, OwnedPages], tenants: Iterable[Tenant]) -> None:
        """What owners of namespaces have of the pool now, for the metrics."""
        names = {tenant.owner: tenant.name for tenant in tenants}
        pages = dict.fromkeys((*names.values(), OTHERS), OwnedPages(0, 0, 0))
        for owner, count in owners.items():
            name = names.get(owner, OTHERS)
            before = pages[name]
            pages[name] = OwnedPages(
                before.active + count.active, before.cached + count.cached, before.floor + count.floor
            )
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        """Metrics with a label per tenant, for those who may see all tenants."""
        counts = {
            "admitted": "Prompts taken in.",
            "refused": "Requests refused at a limit of their tenant's.",
            "prompt_tokens": "Prompt tokens taken in.",
            "cached_tokens": "Those of them that were cached.",
            "completion_tokens": "Tokens generated.",
        }
        accounts = list(self._accounts.items())
        gauge = GaugeMetricFamily("pagetrie:tenant_in_flight", "Prompts in flight.", labels=("tenant",))
        for name, account in accounts:
            gauge.add_metric((name,), account.in_flight)
        yield gauge
        gauge = GaugeMetricFamily("pagetrie:tenant_pages", "Pages of the pool by state.", labels=("tenant", "state"))
        floors = GaugeMetricFamily("pagetrie:tenant_floor_pages", "Pages that are kept for it.", labels=("tenant",))
        for name, pages in self._pages.items():
            gauge.add_metric((name, "active"), pages.active)
            gauge.add_metric((name, "cached"), pages.cached)
            floors.add_metric((name,), pages.floor)
        yield gauge
        yield floors
        for field, text in counts.items():
            family = CounterMetricFamily(f"pagetrie:tenant_{field}", text, labels=("tenant",))
            for name, account in accounts:
                family.add_metric((name,), getattr(account, field))
            yield family
