"""The outputs of one API request's prompts as one stream of deltas, with choices numbered across prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from pagetrie.engine.output import ChoiceDelta, RequestOutput
from pagetrie.engine.runner import TokenLogprob
from pagetrie.errors import EngineError
from pagetrie.server.disconnect import cancel_and_wait
from pagetrie.server.engine_api import Source
from pagetrie.server.errors import ServerStoppingError
from pagetrie.server.quota import Ticket

TIERS = ("ram", "disk", "store")
"""Below the pool, as named in usage."""


@dataclass(slots=True)
class PromptState:
    """The latest numbers of one prompt's request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    completion_tokens: int = 0
    logprobs: list[TokenLogprob | None] | None = None


class OutputStream:
    """Merges the outputs of several engine requests.

    Iterating gives lists of deltas, at most one per choice; choice ``i`` of prompt ``p`` has index ``p * n + i``.
    Outputs are taken from the engine as they come and joined per choice until the consumer asks, so a slow client
    costs no more memory than its finished text, and slows nobody down. ``ticket`` is closed with it.
    """

    def __init__(self, sources: Sequence[Source], n: int, ticket: Ticket | None = None) -> None:
        self.prompts = [PromptState() for _ in sources]
        self._n = n
        self._sources = sources
        self._ticket = ticket
        self._pending: dict[int, ChoiceDelta] = {}
        self._error: Exception | None = None
        self._open = len(sources)
        self._news = asyncio.Event()
        self._pumps = [asyncio.ensure_future(self._pump(i, source)) for i, source in enumerate(sources)]

    def usage(self) -> dict[str, object]:
        """OpenAI's usage object: prompts counted once each, completions over all choices.

        As an addition, cached tokens are split by where they came from.
        """
        prompt = sum(p.prompt_tokens for p in self.prompts)
        completion = sum(p.completion_tokens for p in self.prompts)
        cached = sum(p.cached_tokens for p in self.prompts)
        below = [sum(p.cached_by_tier.get(name, 0) for p in self.prompts) for name in TIERS]
        tiers = dict(zip(TIERS, below, strict=True))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached, "pagetrie": {"pool": cached - sum(below), **tiers}},
        }

    async def __aiter__(self) -> AsyncIterator[list[ChoiceDelta]]:
        """Deltas until every choice has ended.

        Raises:
            PagetrieError: why a request failed, after what came before the failure has been delivered.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            if self._pending:
                deltas = list(self._pending.values())
                self._pending = {}
                yield deltas
            if self._error is not None and not self._pending:
                raise self._error
            if self._open == 0 and not self._pending:
                return

    async def aclose(self) -> None:
        """Abort what still runs and wait until the engine knows. Idempotent."""
        await cancel_and_wait(*self._pumps)
        # A pump that never got to run has not touched its source.
        await asyncio.gather(*(source.aclose() for source in self._sources))
        if self._ticket is not None:
            prompts = self.prompts
            self._ticket.close(
                cached=sum(p.cached_tokens for p in prompts), completion=sum(p.completion_tokens for p in prompts)
            )

    async def _pump(self, prompt: int, source: Source) -> None:
        finished = False
        try:
            async for output in source:
                self._take(prompt, output)
                finished = output.finished
                self._news.set()
            if not finished and self._error is None:
                self._error = EngineError("the engine ended the request without a result")
        except Exception as error:  # noqa: BLE001 - handed to the consumer
            self._error = self._error or error
        finally:
            self._open -= 1
            self._news.set()

    def _take(self, prompt: int, output: RequestOutput) -> None:
        state = self.prompts[prompt]
        state.prompt_tokens = output.prompt_tokens
        state.cached_tokens = output.cached_tokens
        state.cached_by_tier = output.cached_by_tier
        state.completion_tokens = output.completion_tokens
        if output.prompt_logprobs is not None:
            state.logprobs = output.prompt_logprobs
        for delta in output.choices:
            if delta.finish_reason == "abort" and self._error is None:
                self._error = output.error or ServerStoppingError()
            elif delta.finish_reason == "error" and self._error is None:
                self._error = output.error or EngineError("the engine failed while running the request")
            self._merge(prompt * self._n + delta.index, delta)
        if output.error is not None and self._error is None:
            self._error = output.error

    def _merge(self, index: int, delta: ChoiceDelta) -> None:
        # An aborted or failed choice has no finish reason of OpenAI's; the stream's error says what happened.
        reason = delta.finish_reason if delta.finish_reason in ("stop", "length") else None
        waiting = self._pending.get(index)
        if waiting is None:
            self._pending[index] = ChoiceDelta(
                index, delta.text, list(delta.token_ids), list(delta.logprobs), reason, delta.stop_reason
            )
            return
        waiting.text += delta.text
        waiting.token_ids += delta.token_ids
        waiting.logprobs += delta.logprobs
        waiting.finish_reason = reason
        waiting.stop_reason = delta.stop_reason
