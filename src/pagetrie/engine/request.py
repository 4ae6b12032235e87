"""A request as the engine sees it: token ids and parameters, no text and no HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pagetrie.engine.params import SamplingParams
from pagetrie.engine.tenant import LOCAL, Owner, Tenant
from pagetrie.kv import RequestKind

MIN_PRIORITY, MAX_PRIORITY = -100, 100
MAX_TIMEOUT = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class ContextUse:
    """The context that a request starts from; its ids are the prompt's first.

    Attributes:
        id, owner: which one.
        append: the context becomes prompt and answer once the request has ended well.
        version: the context's when the prompt was made; one that appends is refused if others did since.
        note: what the context is to carry then, made from the answer's text.
    """

    id: str
    owner: Owner
    append: bool = False
    version: int = 0
    note: Callable[[str], object] = lambda _: None


@dataclass(slots=True)
class Request:
    """One prompt to complete.

    Attributes:
        request_id: unique among the requests in flight.
        prompt_ids: the prompt, at least one token.
        params: sampling and stopping.
        namespace_salt: narrows sharing within the tenant: only requests with an equal salt share pages. Empty shares
            with all of the tenant's that have none.
        priority: lower is served first; between ``MIN_PRIORITY`` and ``MAX_PRIORITY``. A request that has waited for
            ``ageing_steps`` steps longer counts as one lower.
        timeout: seconds from its arrival after which it ends, waiting or running, with what it has by then; more than 0
            and at most ``MAX_TIMEOUT``. None for no limit. Looked at before each step, so it acts up to a step later.
        context: what it starts from, if that is to be kept.
        tenant: whose it is; pages are shared within a tenant only.
        trace_headers: of the trace that it is part of, for observers.
        kind: what it is, for the eviction policy.
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    namespace_salt: str = ""
    priority: int = 0
    timeout: float | None = None
    context: ContextUse | None = None
    tenant: Tenant = LOCAL
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    kind: RequestKind = RequestKind.UNKNOWN
