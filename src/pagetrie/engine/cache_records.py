"""Why the latest requests hit or missed the cache: noted when each got its first seat, kept for whoever asks later.

Nothing of another namespace is told: a request is compared with what is stored under its tenant's own salt, and, if it
has one, with what is stored under none, which its sender could ask for as well.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from pagetrie.engine.sequence import RequestState, Sequence
from pagetrie.engine.tenant import Owner, Tenant
from pagetrie.errors import InvalidRequestError
from pagetrie.kv import Diagnosis, KVCache
from pagetrie.kv.diagnosis import WINDOW
from pagetrie.kv.tokens import TOKEN_BYTES, pack_tokens

MissReason = Literal[
    "complete", "bypassed", "not_loaded", "evicted", "reset", "computing", "other_namespace",
    "differs", "never_stored",
]  # fmt: skip
"""Why the rest of a prompt wasn't taken from the cache; ``complete``: all was that can be."""
MISS_REASONS: tuple[MissReason, ...] = get_args(MissReason)

KEPT = 1024
BEFORE = 24
"""Tokens kept of the text before the point where prompts part."""
_PROMPTS, _PROMPT_BYTES = 512, 4 << 20
"""Prompts remembered, and the most that they may take together."""
_OPENING = 16
"""So many tokens at most open an answer."""


@dataclass(frozen=True, slots=True)
class CacheRecord:
    """What one request found in the cache.

    Attributes:
        request_id, owner: of the request.
        time: when it was noted, in seconds of the engine's clock.
        prompt_tokens, cached_tokens: as in its usage.
        cached_by_tier: cached tokens that came from a tier below the pool.
        reason: why what wasn't cached wasn't.
        bypass: for ``bypassed``: ``cache_prompt``, ``prompt_logprobs`` or ``no_sharing``.
        matched: where the prompt leaves what is stored.
        before, here, stored: tokens (u32 LE) before that place, of this prompt after it, of the stored text after it.
        below, below_tokens: the tier that holds more of it, and how much, though it wasn't loaded.
        evicted, evicted_at: tokens that were given up, and when.
        evicted_for: the request that needed their pages; empty if that isn't for this one to know.
        computing, computed_by: tokens that a running request holds unpublished, and which one; empty if it has just
            been preempted.
        elsewhere, elsewhere_tokens: part of the namespace without which more would match, and how much.
        rewrites: the earlier request whose answer this prompt seems to write in another way.
        surely: it does so; else only if the texts are the same again further on.
    """

    request_id: str
    owner: Owner
    time: float
    prompt_tokens: int
    cached_tokens: int
    reason: MissReason
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    bypass: str = ""
    matched: int = 0
    before: bytes = b""
    here: bytes = b""
    stored: bytes = b""
    below: str = ""
    below_tokens: int = 0
    evicted: int = 0
    evicted_at: float | None = None
    evicted_for: str = ""
    computing: int = 0
    computed_by: str = ""
    elsewhere: str | None = None
    elsewhere_tokens: int = 0
    rewrites: str = ""
    surely: bool = False


class CacheRecords:
    """The latest requests' records. Lives on the engine's thread.

    Args:
        cache: where they looked.
        namespace: the namespace of a tenant's salt.
        clock: seconds.
        capacity: records kept.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        namespace: Callable[[str, Tenant], bytes],
        clock: Callable[[], float],
        capacity: int = KEPT,
    ) -> None:
        self._cache = cache
        self._namespace = namespace
        self._clock = clock
        self._capacity = capacity
        self._records: OrderedDict[str, CacheRecord] = OrderedDict()
        # The latest prompts, each behind its namespace, and whose they are.
        self._prompts: deque[tuple[bytes, str]] = deque()
        self._prompt_bytes = 0

    def get(self, owner: Owner, request_id: str) -> CacheRecord:
        """The record of a request of that owner.

        Raises:
            InvalidRequestError: 404, no such request of yours, not yet admitted, or too long ago.
        """
        record = self._records.get(request_id)
        if record is None or record.owner.key != owner.key:
            raise InvalidRequestError(
                f"No request {request_id[:100]!r} is remembered: it hasn't begun, or was too long ago.",
                param="id",
                code="request_not_found",
                status=404,
            )
        return record

    def drop(self, tenant: bytes) -> None:
        """Forget what is noted of a tenant, by its ``Tenant.owner``."""
        for record in [record for record in self._records.values() if record.owner.tenant.owner == tenant]:
            del self._records[record.request_id]
        # Whose these are isn't worth a look: they only help to explain.
        self._prompts.clear()
        self._prompt_bytes = 0

    def now(self) -> float:
        return self._clock()

    def note(self, sequence: Sequence, running: Iterable[Sequence]) -> CacheRecord:
        """Diagnose a request that has just got its first seat; nothing of it has been computed yet."""
        record = self._diagnose(sequence, running)
        self._records[record.request_id] = record
        while len(self._records) > self._capacity:
            self._records.popitem(last=False)
        return record

    def add_cached(self, state: RequestState) -> None:
        """More of a request's prompt was found than at its first seat."""
        record = self._records.get(state.request.request_id)
        if record is not None:
            changed = replace(record, cached_tokens=state.cached_tokens, cached_by_tier=state.cached_by_tier)
            self._records[record.request_id] = changed

    def _diagnose(self, sequence: Sequence, running: Iterable[Sequence]) -> CacheRecord:
        state, lease = sequence.state, sequence.lease
        assert lease is not None
        request = state.request
        ids, owner = list(request.prompt_ids), Owner(request.tenant, request.namespace_salt)

        def record(reason: MissReason, **facts: object) -> CacheRecord:
            return CacheRecord(
                request.request_id, owner, self._clock(), len(ids), state.cached_tokens, reason, state.cached_by_tier,
                **facts,  # type: ignore[arg-type]
            )  # fmt: skip

        if not self._cache.shares:
            return record("bypassed", bypass="no_sharing")
        if not request.params.use_prefix_cache:
            return record("bypassed", bypass="cache_prompt")
        prompt = state.namespace + pack_tokens(ids)
        found = None
        if state.reads_cache and state.cached_tokens < len(ids) - 1:
            found = self._cache.diagnose(
                ids, state.namespace, {"salt": self._namespace("", owner.tenant)} if owner.salt else {}
            )
        rewrites, surely = "", False
        if found is not None and found.matched and found.stored:
            rewrites, surely = self._rewritten(prompt, len(state.namespace) + found.matched * TOKEN_BYTES, found.stored)
        self._remember(prompt, request.request_id)
        if not state.reads_cache:
            return record("bypassed", bypass="prompt_logprobs")
        if found is None:
            return record("complete", matched=state.cached_tokens)
        if found.matched >= len(ids) - 1:
            # Stored since the look-up, by a sequence that gave its seat to this one.
            return record("computing", matched=state.cached_tokens, computing=len(ids) - 1 - state.cached_tokens)
        at = found.matched
        computing, computed_by = _being_computed(sequence, running, ids, at)
        reason = _reason(found, computing, self._cache.page_size)
        loss = found.eviction
        return record(
            reason,
            matched=at,
            before=pack_tokens(ids[max(0, at - BEFORE) : at]),
            here=pack_tokens(ids[at : at + WINDOW]),
            stored=found.stored,
            below=found.below,
            below_tokens=found.below_tokens,
            evicted=found.evicted,
            evicted_at=None if loss is None else loss.time,
            evicted_for=loss.holder if loss is not None and loss.namespace == state.namespace else "",
            computing=computing,
            computed_by=computed_by,
            elsewhere=found.elsewhere,
            elsewhere_tokens=found.elsewhere_tokens,
            rewrites=rewrites,
            surely=surely,
        )

    def _remember(self, prompt: bytes, request_id: str) -> None:
        self._prompts.append((prompt, request_id))
        self._prompt_bytes += len(prompt)
        while self._prompt_bytes > _PROMPT_BYTES or len(self._prompts) > _PROMPTS:
            self._prompt_bytes -= len(self._prompts.popleft()[0])

    def _rewritten(self, prompt: bytes, end: int, stored: bytes) -> tuple[str, bool]:
        """The earlier request whose answer this prompt writes in another way, and whether that is sure.

        ``prompt`` stands behind its namespace and leaves the tree after ``end`` bytes; ``stored`` follows there.

        What is stored where the prompt leaves the tree is either part of a prompt or of an answer. If no prompt is
        known to go on there, but one is known to have ended before, it is that one's answer. If a prompt goes on there
        for a few tokens only, these may be the words that open an answer, which a template writes otherwise once the
        answer is there; only the text that follows can tell.
        """
        opening = answered = ""
        longest = b""
        for other, request_id in reversed(self._prompts):
            if len(other) > end:
                if other.startswith(stored[:TOKEN_BYTES], end) and other.startswith(prompt[:end]):
                    if len(other) - end > _OPENING * TOKEN_BYTES:
                        return "", False
                    opening = opening or request_id
            elif len(other) > len(longest) and prompt.startswith(other):
                longest, answered = other, request_id
        if opening:
            return opening, False
        return (answered, True) if longest else ("", False)


def _reason(found: Diagnosis, computing: int, page_size: int) -> MissReason:
    at = found.matched
    if found.below_tokens >= page_size:
        return "not_loaded"
    loss = found.eviction
    if loss is not None and found.evicted >= computing:
        return "reset" if loss.cause == "reset" else "evicted"
    if computing:
        return "computing"
    if found.elsewhere is not None and found.elsewhere_tokens >= at + page_size:
        return "other_namespace"
    return "differs" if at and found.stored else "never_stored"


def _being_computed(sequence: Sequence, running: Iterable[Sequence], ids: list[int], at: int) -> tuple[int, str]:
    """How many tokens past ``at`` the running sequence that shares most of them has, and whose it is."""
    most, whose = 0, ""
    namespace = sequence.state.namespace
    for other in running:
        theirs, state = other.ids, other.state
        if (
            state is sequence.state
            or state.namespace != namespace
            or not state.request.params.use_prefix_cache
            or len(theirs) <= at + most
            or theirs[at + most] != ids[at + most]
            or theirs[: at + most] != ids[: at + most]
        ):
            continue
        common = at + most
        while common < min(len(ids) - 1, len(theirs)) and theirs[common] == ids[common]:
            common += 1
        if common > at + most:
            most, whose = common - at, state.request.request_id
    return most, whose
