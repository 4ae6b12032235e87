"""Why a request hit or missed the cache, in words: ``explain_cache`` in requests, ``GET /v1/requests/{id}/cache``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from pagetrie.engine.cache_records import CacheRecord
from pagetrie.engine.engine import Engine
from pagetrie.engine.tenant import Owner
from pagetrie.errors import InvalidRequestError
from pagetrie.kv.tokens import unpack_tokens
from pagetrie.server.auth import caller
from pagetrie.server.context import ServerContext
from pagetrie.server.fanin import OutputStream
from pagetrie.server.metrics import POOL
from pagetrie.server.prompts import MAX_PROMPTS
from pagetrie.server.sse import event
from pagetrie.text.prompt_diff import Part, advice_on, describe_part


async def show(context: ServerContext, http: HttpRequest, request_id: str) -> Response:
    """A recent request's explanation."""
    context.check_available()
    owner = caller(http).owner(http.query_params.get("cache_salt"))
    return JSONResponse(await _explain(context, request_id, owner, MAX_PROMPTS))


class Explained:
    """The explanation that an API request asked for along with its answer."""

    def __init__(self, context: ServerContext, request_id: str, outputs: OutputStream, owner: Owner) -> None:
        self._context = context
        self._request_id = request_id
        self._owner = owner
        self._prompts = len(outputs.prompts)

    async def fields(self) -> dict[str, Any]:
        """What it adds to the answer."""
        return {"explain_cache": await _explain(self._context, self._request_id, self._owner, self._prompts)}

    async def after(self, events: AsyncGenerator[bytes, None], head: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """A stream's events, then one without choices that carries the explanation."""
        async for chunk in events:
            yield chunk
        yield event({**head, "choices": [], **await self.fields()})


async def _explain(context: ServerContext, request_id: str, owner: Owner, prompts: int) -> dict[str, Any]:
    """Explain every prompt of an API request, at most ``prompts`` of them.

    Raises:
        InvalidRequestError: 404, none of them is remembered.
    """

    def look(engine: Engine) -> tuple[list[CacheRecord], float]:
        records = engine.cache_records
        found = [records.get(owner, f"{request_id}-0")]
        for number in range(1, prompts):
            try:
                found.append(records.get(owner, f"{request_id}-{number}"))
            except InvalidRequestError:
                break
        return found, records.now()

    try:
        found, now = await context.loop.ask(look)
    except InvalidRequestError as error:
        shown = request_id[:100]
        raise InvalidRequestError(
            f"No request '{shown}' is remembered: it hasn't begun, or was too long ago.",
            param=error.param,
            code=error.code,
            status=error.status,
        ) from None
    explained = await context.workers.run(0, lambda: [explain_record(context, record, now) for record in found])
    return {"id": request_id, "object": "request.cache", "prompts": explained}


def explain_record(context: ServerContext, record: CacheRecord, now: float) -> dict[str, Any]:
    """One prompt's explanation.

    Args:
        context: knows the tokenizer.
        record: what was noted.
        now: seconds, by the clock of the record.
    """
    below = dict(record.cached_by_tier)
    explained: dict[str, Any] = {
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "cached_by_tier": {POOL: record.cached_tokens - sum(below.values()), **below},
        "reason": record.reason,
        "explanation": _sentence(record, now),
    }
    if record.stored and record.here:
        explained["first_difference"] = describe_part(_part(record), context.tokenizer)
    if record.evicted_at is not None:
        explained["evicted"] = {
            "tokens": record.evicted,
            "seconds_ago": round(now - record.evicted_at, 3),
            "by": _short(record.evicted_for) or None,
        }
    if record.computing:
        explained["computing"] = {"tokens": record.computing, "by": _short(record.computed_by)}
    if record.elsewhere is not None:
        explained["other_namespace"] = {"part": record.elsewhere, "tokens": record.elsewhere_tokens}
    if record.below_tokens:
        explained["kept_in_tier"] = {"tier": record.below, "tokens": record.below_tokens}
    explained["advice"] = _advice(record)
    return explained


def _sentence(record: CacheRecord, now: float) -> str:
    cached = f"{record.cached_tokens} of {record.prompt_tokens} prompt tokens were cached"
    match record.reason:
        case "complete":
            return f"{cached}: all that can be, since a prompt's last token is always computed."
        case "bypassed":
            why = {
                "cache_prompt": "the request says cache_prompt: false",
                "prompt_logprobs": "log-probabilities of the prompt were asked for, which needs all of it computed",
                "no_sharing": "this server shares no prefixes (its layout is contiguous, or it has no prefix index)",
            }[record.bypass]
            return f"The cache wasn't looked at: {why}."
        case "not_loaded":
            return (
                f"{cached}. The {record.below} tier holds {record.below_tokens} more that were not loaded: computing "
                "them was estimated to be faster, or loading them took too long."
            )
        case "evicted":
            ago = now - (record.evicted_at or now)
            by = f" for request {_short(record.evicted_for)}" if record.evicted_for else ""
            return f"{cached}. {record.evicted} more were stored and gave way{by} {ago:.1f} s ago."
        case "reset":
            ago = now - (record.evicted_at or now)
            return f"{cached}. {record.evicted} more were stored until the cache was reset {ago:.1f} s ago."
        case "computing" if not record.computed_by:
            return f"{cached}. Another request held {record.computing} more on a page that it still filled."
        case "computing":
            return (
                f"{cached}. Request {_short(record.computed_by)} holds {record.computing} more on a page that it still "
                "fills; a page can be shared once it is full or its request has ended."
            )
        case "other_namespace":
            return (
                f"{cached}. {record.elsewhere_tokens} are stored without its {_PARTS[record.elsewhere or '']}"
                ", which keeps pages apart."
            )
        case "differs":
            return f"{cached}. At token {record.matched} the stored text goes on otherwise: see first_difference."
        case "never_stored":
            return f"{cached}. What follows was never stored, or so long ago that its eviction isn't remembered."


_PARTS = {"salt": "cache_salt"}


def _advice(record: CacheRecord) -> list[dict[str, str]]:
    match record.reason:
        case "differs" | "never_stored" if record.stored:
            return advice_on(_part(record), rewrites=_short(record.rewrites), surely=record.surely)
        case "evicted":
            text = (
                "Keep what is needed again from being evicted with a context (/v1/contexts), give the pool more memory "
                "(--kv-memory), or let evicted pages go to memory or disk (--ram-cache, --disk-cache)."
            )
            return [{"code": "pool_too_small", "text": text}]
        case "computing":
            text = "Send requests that share a prompt together, or the second one after the first has begun to answer."
            return [{"code": "wait_for_the_first", "text": text}]
        case "other_namespace":
            return [{"code": "use_the_same_salt", "text": "Requests share pages only with an equal cache_salt."}]
        case "bypassed" if record.bypass == "cache_prompt":
            return [{"code": "allow_the_cache", "text": "Leave out cache_prompt, or set it to true."}]
        case _:
            return []


def _part(record: CacheRecord) -> Part:
    before, here, stored = map(unpack_tokens, (record.before, record.here, record.stored))
    return Part(record.matched, before, here, stored)


def _short(engine_id: str) -> str:
    """An API request's id out of one of its prompts' ids."""
    return engine_id.rpartition("-")[0]
