"""A request as the engine sees it: token ids and parameters, no text and no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagetrie.engine.params import SamplingParams

MIN_PRIORITY, MAX_PRIORITY = -100, 100


@dataclass(slots=True)
class Request:
    """One prompt to complete.

    Attributes:
        request_id: unique among the requests in flight.
        prompt_ids: the prompt, at least one token.
        params: sampling and stopping.
        namespace_salt: narrows sharing: only requests with an equal salt share pages. Empty shares with all that
            have none.
        priority: lower is served first; between ``MIN_PRIORITY`` and ``MAX_PRIORITY``. A request that has waited for
            ``ageing_steps`` steps longer counts as one lower.
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    namespace_salt: str = ""
    priority: int = 0
