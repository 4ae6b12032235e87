"""Eviction policies: which leaf of the prefix tree goes first when pages are needed."""

from __future__ import annotations

import time

from pagetrie.kv.eviction.adaptive import Adaptive
from pagetrie.kv.eviction.classic import Fifo, Gdsf, Lfu, Lru, S3Fifo, Slru, Ttl
from pagetrie.kv.eviction.policy import Clock, EvictionPolicy, RequestKind, Use

POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in (Lru, Fifo, Lfu, Slru, S3Fifo, Gdsf, Ttl, Adaptive)
}


def make_policy(name: str, num_pages: int, page_tokens: int, clock: Clock = time.monotonic) -> EvictionPolicy:
    """A policy by its name, for a pool of ``num_pages`` pages of ``page_tokens`` tokens. See ``POLICIES``."""
    return POLICIES[name](num_pages, page_tokens, clock)


__all__ = ["POLICIES", "Clock", "EvictionPolicy", "RequestKind", "Use", "make_policy"]
