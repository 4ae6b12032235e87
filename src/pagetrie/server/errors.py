"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import ceil

from starlette.responses import Response

from pagetrie.errors import (
    DeadlineExceededError,
    EngineError,
    HoldLimitError,
    InvalidRequestError,
    PagetrieError,
    QueueFullError,
)

RETRY_AFTER_SECONDS = 1
HTTP_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    431: "request_head_too_large",
}


class RateLimitError(PagetrieError):
    """A tenant is at one of its limits (HTTP 429).

    Attributes:
        retry_after: whole seconds after which it may try again, at least 1.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = max(1, ceil(retry_after))


class ServerStoppingError(PagetrieError):
    """The server is going down and takes no more work (HTTP 503)."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error ready to be sent, as a response or inside a stream."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """The JSON error object, UTF-8."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False).encode("utf-8", "replace")

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")


INTERNAL_ERROR = ApiError(500, "The server failed while handling the request.", "server_error", None, "internal_error")


def to_api_error(error: BaseException) -> ApiError:
    """What a client may know of an exception. Unexpected ones give nothing away."""
    match error:
        case InvalidRequestError():
            return ApiError(error.status, error.message, "invalid_request_error", error.param, error.code)
        case QueueFullError():
            retry = {"retry-after": str(RETRY_AFTER_SECONDS)}
            return ApiError(429, str(error), "rate_limit_error", None, "rate_limit_exceeded", retry)
        case RateLimitError():
            retry = {"retry-after": str(error.retry_after)}
            return ApiError(429, str(error), "rate_limit_error", None, "rate_limit_exceeded", retry)
        case HoldLimitError():
            return ApiError(429, str(error), "rate_limit_error", None, "pinned_pages_limit")
        case ServerStoppingError():
            retry = {"retry-after": str(RETRY_AFTER_SECONDS)}
            return ApiError(503, str(error), "server_error", None, "service_unavailable", retry)
        case DeadlineExceededError():
            # Whoever set the limit decides what to do; OpenAI's clients would try again on their own.
            return ApiError(504, str(error), "timeout_error", None, "deadline_exceeded", {"x-should-retry": "false"})
        case EngineError():
            return ApiError(500, str(error), "server_error", None, "engine_error")
        case _:
            return INTERNAL_ERROR


def is_expected(error: BaseException) -> bool:
    """Whether an exception is the client's business or a known state; others belong in the log with a traceback."""
    return isinstance(
        error,
        InvalidRequestError
        | HoldLimitError
        | QueueFullError
        | RateLimitError
        | DeadlineExceededError
        | ServerStoppingError,
    )


def http_error(status: int, detail: str, headers: dict[str, str] | None = None) -> ApiError:
    """An error of the transport: no such route, wrong method, wrong media type, body too large."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return ApiError(status, detail, kind, None, HTTP_CODES.get(status), headers or {})


def model_not_found(name: str) -> InvalidRequestError:
    shown = name if len(name) <= 200 else name[:200] + "..."
    return InvalidRequestError(
        f"The model '{shown}' does not exist.", param="model", code="model_not_found", status=404
    )
