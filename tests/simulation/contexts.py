"""The contexts of a world: made, used, forked, appended to and deleted as its spec says."""

from __future__ import annotations

from collections.abc import Sequence

from pagetrie.engine.contexts import Context, Contexts
from pagetrie.engine.request import ContextUse
from pagetrie.engine.tenant import Owner
from pagetrie.errors import HoldLimitError, InvalidRequestError
from pagetrie.kv import KVCache
from tests.simulation.spec import ContextSpec, RequestSpec

MAX_CONTEXTS = 8


class ContextKeeper:
    """Plays the contexts' part of a world.

    Attributes:
        by_id: all that there have been, by the engine's ids and, where the spec names them, by the world's names.
    """

    def __init__(self, contexts: Contexts, cache: KVCache, specs: Sequence[ContextSpec]) -> None:
        self._contexts = contexts
        self._cache = cache
        self._specs = specs
        self._coming = list(specs)
        self.by_id: dict[str, Context] = {}

    def change(self, now: int) -> list[RequestSpec]:
        """Make and delete those whose step has come; a new one is computed by a request without an answer.

        Returns:
            These requests.
        """
        contexts, warming = self._contexts, list[RequestSpec]()
        for spec in [spec for spec in self._coming if spec.arrival <= now]:
            self._coming.remove(spec)
            try:
                context = contexts.create(Owner(salt=spec.salt), list(spec.ids), ttl=spec.ttl)
            except (HoldLimitError, InvalidRequestError):
                pages = self._cache.pages_for(len(spec.ids))
                assert pages > self._cache.hold_limit or len(contexts) >= MAX_CONTEXTS, "a context was refused"
                continue
            self.by_id[context.id] = self.by_id[spec.name] = context
            warming.append(RequestSpec(f"warm {spec.name}", 0, (), {"max_tokens": 0}, spec.salt, context=spec.name))
        contexts.expire()
        for spec in self._specs:
            context_or_none = self.by_id.get(spec.name)
            if spec.end <= now and context_or_none is not None and not context_or_none.closed:
                contexts.delete(context_or_none.owner, context_or_none.id)
        return warming

    def use(self, spec: RequestSpec) -> ContextUse | None:
        """What a request does with its context; None if that has ended, is busy or can't be forked."""
        contexts = self._contexts
        contexts.expire()
        context = self.by_id.get(spec.context or "")
        if context is None or context.closed:
            return None
        if spec.use == "fork":
            if len(contexts) >= MAX_CONTEXTS:
                return None
            pinned = self._cache.stats().pinned_pages
            (fork,) = contexts.fork(context.owner, context.id, 1)
            assert self._cache.stats().pinned_pages == pinned, "a fork took pages"
            assert fork.ids == context.ids
            self.by_id[fork.id] = context = fork
        if spec.use == "append" and context.growing:
            return None
        return ContextUse(context.id, context.owner, append=spec.use == "append", version=context.version)

    def check(self, use: ContextUse, ids: Sequence[int]) -> None:
        """A request that appends has ended: the context holds ``ids`` and is free for the next."""
        context = self.by_id[use.id]
        assert context.closed or (context.ids == ids and not context.growing), "a context holds something else"

    def delete_all(self) -> None:
        """Nobody uses them any more."""
        self._contexts.expire()
        for context in list(self._contexts):
            assert not context.users and not context.growing
            self._contexts.delete(context.owner, context.id)
