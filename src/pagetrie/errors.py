"""Errors that cross a boundary of the program.

Each carries what a person needs in order to act: what was wrong, the limit and the value.
"""

from __future__ import annotations


class PagetrieError(Exception):
    """Base of every error that pagetrie raises on purpose."""


class ModelLoadError(PagetrieError):
    """A model file or folder can't be used: missing, truncated, corrupt or unsupported."""


class ConfigError(PagetrieError):
    """An option has a value that can't work on this machine or with this model."""


class InvalidRequestError(PagetrieError):
    """A request that can't be served as it stands; maps to OpenAI's error object.

    Attributes:
        message: what is wrong, with the limit and the value.
        param: the request field at fault, or None.
        code: OpenAI's machine-readable code (``context_length_exceeded``, ...), or None.
        status: the HTTP status to answer with.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class QueueFullError(PagetrieError):
    """The waiting queue is at its cap; the client should retry later (HTTP 429)."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the waiting queue is full ({limit} requests); retry later")
        self.limit = limit


class HoldLimitError(PagetrieError):
    """Pinned prefixes would take more of the pool than they may (HTTP 429).

    Attributes:
        adds: pages that the refused prefix would have pinned besides those pinned already.
        pinned: pages pinned now.
        limit: most pages that may be pinned.
    """

    def __init__(self, *, adds: int, pinned: int, limit: int) -> None:
        super().__init__(
            f"pinned prefixes may take {limit} pages, {pinned} are taken and this one adds {adds}; release some first"
            if limit
            else "no prefix can be pinned: that takes the paged layout, a prefix index and a share of the pool for it"
        )
        self.adds = adds
        self.pinned = pinned
        self.limit = limit


class DeadlineExceededError(PagetrieError):
    """A request's time was up before it was done (HTTP 504); what it had produced was handed out before."""

    def __init__(self, timeout: float, tokens: int) -> None:
        super().__init__(f"the request's timeout of {timeout:g} s passed after {tokens} generated tokens")
        self.timeout = timeout


class EngineError(PagetrieError):
    """The model failed while running a request; the server goes on (HTTP 500)."""
