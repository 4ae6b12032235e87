"""A live snapshot as JSON: short arrays, since a frame goes out every second to every viewer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagetrie.engine.live import MAX_EDGES, WINDOW, LiveSnapshot, RequestView, may_read
from pagetrie.engine.tenant import LOCAL, Tenant
from pagetrie.engine.timeline import percentiles
from pagetrie.kv.picture import LOADING, NOBODY, PageOwner, Picture
from pagetrie.kv.tokens import unpack_tokens
from pagetrie.server.text_api import TokenizerLike

MAX_CELLS = 4096
"""Cells of the map; in a larger pool each stands for several pages."""
LABEL_CHARACTERS = 100
_NO_STATE = LOADING + 1
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_MOST = len(_DIGITS) - 1


class FrameWriter:
    """Makes frames. Texts of edges, which seldom change, are decoded once.

    Args:
        tokenizer: decodes.
    """

    def __init__(self, tokenizer: TokenizerLike) -> None:
        def decode(head: bytes) -> str:
            return tokenizer.decode(unpack_tokens(head), skip_special=False)[:LABEL_CHARACTERS]

        self._text = lru_cache(maxsize=4 * MAX_EDGES)(decode)

    def write(
        self, snapshot: LiveSnapshot, viewer: Tenant, tenants: Iterable[Tenant], server: dict[str, Any]
    ) -> dict[str, Any]:
        """The whole frame.

        Args:
            snapshot: the moment.
            viewer: whose texts are shown.
            tenants: all there are now.
            server: what stays the same, and when this is.
        """
        picture, usage, stats = snapshot.picture, snapshot.usage, snapshot.stats
        holding = usage.holding
        return {
            "server": {**server, "page_size": snapshot.page_size, "build_ms": round(snapshot.build_seconds * 1e3, 2)},
            "load": {
                "running": snapshot.running,
                "waiting": snapshot.waiting,
                "contexts": snapshot.contexts,
                "prefill_tokens": snapshot.prefill_tokens,
                "generated_tokens": snapshot.generated_tokens,
                "preemptions": snapshot.preemptions,
            },
            "pages": {
                "total": stats.total_pages,
                "free": stats.free_pages,
                "active": stats.active_pages,
                "cached": stats.cached_pages,
                "loading": stats.loading_pages,
                "pinned": stats.pinned_pages,
                "evicted": stats.evicted_pages,
                "copied": stats.copied_pages,
                **_cells(picture),
            },
            "owners": _owners(picture.owners, tenants),
            "tree": {
                "all": picture.edges_in_all,
                **asdict(usage.tree),
                "edges": _edges(picture, self._labels(picture, viewer)),
            },
            "requests": [_request(request) for request in snapshot.requests],
            "more_waiting": snapshot.more_waiting,
            "latency": {
                "window": WINDOW,
                "ttft": _milliseconds(snapshot.first_tokens),
                "tpot": _milliseconds(snapshot.token_times),
            },
            "hits": {"window": WINDOW, "prompt": snapshot.prompt_tokens, "tiers": snapshot.cached_by_tier},
            "misses": snapshot.misses,
            "tiers": {
                name: {
                    "pages": tier.pages,
                    "used": tier.used_bytes,
                    "capacity": tier.capacity_bytes,
                    "healthy": tier.healthy,
                }
                for name, tier in snapshot.tiers.items()
            },
            "memory": {
                "pages": holding.pages,
                "references": holding.references,
                "slots": holding.slots,
                "unused": usage.unused,
                "reserved": usage.reserved,
                "unused_if_reserved": usage.unused_if_reserved,
            },
        }

    def _labels(self, picture: Picture, viewer: Tenant) -> list[str | None]:
        """What each edge begins with; None where the viewer may not read it."""
        readable = [may_read(owner, viewer) for owner in picture.owners]
        return [
            self._text(edge.head) if edge.owner != NOBODY and readable[edge.owner] else None for edge in picture.edges
        ]


def _cells(picture: Picture) -> dict[str, Any]:
    """One character per cell: state, page tables that share it, and owner (z for more, - for nobody)."""
    per_cell = -(-len(picture.states) // MAX_CELLS)
    states, shares, owner = (
        _grouped(plane, per_cell, filler)
        for plane, filler in ((picture.states, _NO_STATE), (picture.shares, 0), (picture.owner, NOBODY))
    )
    if per_cell > 1:
        # A cell shows what most of its pages are, the most sharers, and whose the first such page is.
        usual = np.stack([(states == state).sum(axis=1) for state in range(_NO_STATE)]).argmax(axis=0)
        first = (states == usual[:, None]).argmax(axis=1)
        states, shares, owner = usual.astype(np.uint8), shares.max(axis=1), owner[np.arange(len(owner)), first]
    return {
        "per_cell": per_cell,
        "states": states.tobytes().translate(_AS_DIGIT).decode(),
        "shares": shares.tobytes().translate(_AS_DIGIT).decode(),
        "owner": owner.tobytes().translate(_AS_OWNER).decode(),
    }


_AS_DIGIT = bytes(ord(_DIGITS[min(value, _MOST)]) for value in range(256))
_AS_OWNER = _AS_DIGIT[:NOBODY] + b"-"


def _grouped(plane: bytes, per_cell: int, filler: int) -> NDArray[np.uint8]:
    """A row per cell; ``filler`` where the last one has no pages left."""
    pages = np.frombuffer(plane, np.uint8)
    return np.pad(pages, (0, -len(pages) % per_cell), constant_values=filler).reshape(-1, per_cell)


def _owners(owners: Sequence[PageOwner], tenants: Iterable[Tenant]) -> list[dict[str, Any]]:
    """Owners by name, without giving salts away; a tenant that was removed has none."""
    names = {tenant.salt: tenant.name for tenant in (LOCAL, *tenants)}
    return [
        {"tenant": None if owner.public else names.get(owner.tenant), "salted": owner.salted, "public": owner.public}
        for owner in owners
    ]


def _edges(picture: Picture, labels: Sequence[str | None]) -> list[list[Any]]:
    order = {tick: rank for rank, tick in enumerate(sorted({edge.last_used for edge in picture.edges}))}
    hottest = max(1, len(order) - 1)
    return [
        [
            edge.number, edge.parent, edge.owner, edge.start, edge.tokens, edge.pages, edge.below, edge.leaves,
            edge.pins, int(edge.active), 100 if edge.active else round(90 * order[edge.last_used] / hottest),
            edge.hidden, label,
        ]
        for edge, label in zip(picture.edges, labels, strict=True)
    ]  # fmt: skip


EDGE_FIELDS = (
    "number", "parent", "owner", "start", "tokens", "pages", "below", "leaves", "pins", "active", "heat", "hidden",
    "label",
)  # fmt: skip


def _request(request: RequestView) -> dict[str, Any]:
    return {
        "id": request.id,
        "phases": [[phase, round(ago, 3)] for phase, ago in request.phases],
        "tenant": request.tenant,
        "prompt": request.prompt_tokens,
        "cached": request.cached_tokens,
        "computed": request.computed_tokens,
        "generated": request.generated_tokens,
        "max": request.max_tokens,
        "preemptions": request.preemptions,
        "choices": request.choices,
        "pages": request.pages,
        "reason": request.reason,
    }


def _milliseconds(seconds: Sequence[float]) -> dict[str, Any]:
    found = percentiles(seconds)
    return {
        "count": len(seconds),
        **{f"p{rank}": round(v * 1e3, 1) for rank, v in zip((50, 90, 99), found, strict=False)},
    }
