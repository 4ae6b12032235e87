"""What may enter an engine: the limits of one request, checked before it is queued."""

from __future__ import annotations

from collections.abc import Callable

from pagetrie.engine.config import EngineConfig
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import MAX_PRIORITY, MAX_TIMEOUT, MIN_PRIORITY, Request
from pagetrie.engine.tenant import Tenant
from pagetrie.engine.text_stream import Vocabulary
from pagetrie.errors import InvalidRequestError
from pagetrie.kv import KVCache


class Door:
    """Knows the limits that no request can pass. Any thread may ask it.

    Args:
        config, cache, vocabulary: the engine's.
        namespace: the namespace of a tenant's pages.

    Attributes:
        longest: tokens of the longest sequence: it can neither outgrow the context nor an otherwise empty pool.
    """

    def __init__(
        self, config: EngineConfig, cache: KVCache, vocabulary: Vocabulary, namespace: Callable[[str, Tenant], bytes]
    ) -> None:
        self._namespace = namespace
        self._config = config
        self._cache = cache
        self._vocabulary = vocabulary
        self._eos = frozenset(vocabulary.eos_ids)
        self.longest = min(config.max_model_len, cache.num_pages * cache.page_size)

    def max_len(self, tenant: Tenant) -> int:
        """Longest sequence of a tenant, in tokens: others' floors stay theirs."""
        longest = min(self.longest, self._reach(tenant) * self._cache.page_size)
        return longest if tenant.max_model_len is None else min(longest, tenant.max_model_len)

    def _reach(self, tenant: Tenant) -> int:
        return self._cache.reach(self._namespace("", tenant)) if tenant.salt else self._cache.num_pages

    def end_ids(self, params: SamplingParams) -> set[int]:
        """Every token that ends a text."""
        return {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}

    def validate(self, request: Request) -> None:
        """Refuse what can never be served. Raises InvalidRequestError."""
        params, length = request.params, len(request.prompt_ids)
        if length == 0:
            raise InvalidRequestError("the prompt is empty; at least one token is needed", param="prompt")
        # The first token to generate needs a position too.
        spare = 0 if params.max_tokens == 0 else 1
        max_len = self.max_len(request.tenant)
        if length + spare > max_len:
            pool = self._cache.num_pages * self._cache.page_size
            if max_len < self.longest:
                limit = f"your maximum context length is {max_len} tokens"
            elif self._config.max_model_len <= pool:
                limit = f"this model's maximum context length is {self._config.max_model_len} tokens"
            else:
                limit = f"the cache holds at most {pool} tokens (the context limit is {self._config.max_model_len})"
            needs = " and needs room for at least 1 more" if spare else ""
            raise InvalidRequestError(
                f"{limit}, but the prompt has {length} tokens{needs}", param="prompt", code="context_length_exceeded"
            )
        vocab_size = self._vocabulary.vocab_size
        for name, ids in (
            ("prompt", request.prompt_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                bad = min(ids) if min(ids) < 0 else max(ids)
                raise InvalidRequestError(
                    f"token id {bad} is outside the vocabulary (0 to {vocab_size - 1})", param=name
                )
        if not MIN_PRIORITY <= request.priority <= MAX_PRIORITY:
            raise InvalidRequestError(
                f"priority must be between {MIN_PRIORITY} and {MAX_PRIORITY}, got {request.priority}", param="priority"
            )
        appends = request.context is not None and request.context.append
        if appends and (params.n > 1 or params.stop or params.beam_width):
            raise InvalidRequestError(
                "only one choice without stop strings and beams can be appended to a context: "
                f"n is {params.n}, and a stop string would end the text inside a token",
                param="append",
            )
        timeout = request.timeout
        if timeout is not None and not 0 < timeout <= MAX_TIMEOUT:
            raise InvalidRequestError(
                f"timeout must be more than 0 and at most {MAX_TIMEOUT:g} seconds, got {timeout:g}", param="timeout"
            )
        if params.beam_width:
            self._validate_beams(request)
        if params.n > self._config.max_num_seqs:
            raise InvalidRequestError(
                f"n ({params.n}) exceeds the server's limit of {self._config.max_num_seqs} sequences at once", param="n"
            )

    def _validate_beams(self, request: Request) -> None:
        params, length, cache = request.params, len(request.prompt_ids), self._cache
        width, seats = params.beam_width, self._config.max_num_seqs
        if width > seats:
            raise InvalidRequestError(
                f"beam_width ({width}) exceeds the server's limit of {seats} sequences at once", param="beam_width"
            )
        # Beams share the pages that the prompt fills; each writes one of its own.
        pages = length // cache.page_size + width * (cache.pages_for(length + 1) - length // cache.page_size)
        if pages > (most := self._reach(request.tenant)):
            raise InvalidRequestError(
                f"{width} beams on {length} tokens take {pages} pages, but the cache has {most}",
                param="beam_width",
            )
        candidates = max(2, 1 + len(self.end_ids(params))) * width
        if candidates > self._vocabulary.vocab_size:
            raise InvalidRequestError(
                f"{width} beams choose among {candidates} tokens, but the vocabulary has {self._vocabulary.vocab_size}",
                param="beam_width",
            )
