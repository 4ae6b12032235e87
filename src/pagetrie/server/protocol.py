"""Requests of the HTTP interface: which fields there are, of what type, and what they mean for the engine.

Scalars are checked by pydantic in strict mode; lists that a client can make huge are checked by hand, so that the
first wrong item ends the work. null always means "as if left out".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from pagetrie.engine.params import MAX_CHOICES, MAX_LOGPROBS, SamplingParams
from pagetrie.errors import InvalidRequestError
from pagetrie.server.fields import check_extra_fields
from pagetrie.server.text_api import TokenizerLike

DEFAULT_COMPLETION_TOKENS = 16
INT64 = 2**63
MAX_TTL = 7 * 86400
"""Longest time to live of a context, in seconds."""


class StreamOptions(BaseModel):
    """``stream_options``. ``include_obfuscation`` is accepted and ignored: there is no padding to leave out."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ApiRequest(BaseModel):
    """What all requests share: an optional model name, and no field that nobody knows."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """A request from a JSON body.

        Raises:
            InvalidRequestError: not JSON, not an object, an unknown field, a wrong type or range.
        """
        try:
            data = from_json(body, allow_inf_nan=False)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"The body is not valid JSON: {error}", code="invalid_json") from None
        if not isinstance(data, dict):
            raise InvalidRequestError(f"The body must be a JSON object, but is {json_type(data)}.", code="invalid_type")
        try:
            request = cls.model_validate(data)
        except ValidationError as error:
            raise _first_error(error) from None
        check_extra_fields(request.model_extra)
        request.check()
        return request

    def check(self) -> None:
        """Check what concerns more than one field."""


class GenerationRequest(ApiRequest):
    """The fields that chat and plain completions share. Meanings are those of ``SamplingParams`` and ``Request``."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = Field(default=None, ge=-INT64, lt=INT64)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: Any = None
    cache_salt: str | None = None
    cache_prompt: bool | None = None
    cache_ttl: float | None = None
    priority: int | None = None
    timeout: float | None = None
    add_special_tokens: bool | None = None
    context: str | None = None
    append: bool | None = None
    beam_width: int | None = Field(default=None, ge=1)
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: Any = None
    explain_cache: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "The 'stream_options' parameter is only allowed when 'stream' is enabled.", param="stream_options"
            )
        if self.cache_salt == "":
            raise InvalidRequestError(
                "Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt"
            )
        if self.append and self.context is None:
            raise InvalidRequestError("'append' needs a 'context' to append to.", param="append")
        if self.stream and self._beams():
            raise InvalidRequestError(
                "A beam search can't be streamed: which text is the best is known at its end.", param="stream"
            )
        _check_response_format(self.response_format)

    def _beams(self) -> int:
        """The width of a beam search, 0 for none. vLLM's ``use_beam_search`` keeps as many beams as choices."""
        return self.beam_width or ((self.n or 1) if self.use_beam_search else 0)

    def _sampling(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None, tokenizer: TokenizerLike
    ) -> SamplingParams:
        given: dict[str, Any] = {
            name: value
            for name in (
                "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
                "frequency_penalty", "repetition_penalty", "ignore_eos", "skip_special_tokens", "length_penalty",
                "early_stopping",
            )
            if (value := getattr(self, name)) is not None
        }  # fmt: skip
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=_logit_bias(self.logit_bias, tokenizer),
            stop=_stop_strings(self.stop),
            stop_token_ids=_token_list(self.stop_token_ids, "stop_token_ids", tokenizer),
            use_prefix_cache=self.cache_prompt is not False,
            cache_ttl=self.cache_ttl,
            beam_width=self._beams(),
            **given,
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None

    def check(self) -> None:
        super().check()
        n = 1 if self.n is None else self.n
        if self.best_of is None:
            return
        if not n <= self.best_of <= MAX_CHOICES:
            raise InvalidRequestError(
                f"best_of ({self.best_of}) must be at least n ({n}) and at most {MAX_CHOICES}.", param="best_of"
            )
        if self.best_of > n:
            for name in ("stream", "append", "beam_width"):
                if getattr(self, name):
                    raise InvalidRequestError(
                        f"'best_of' above n can't be combined with '{name}': the best are known at the end.",
                        param="best_of",
                        code="unsupported_value",
                    )

    def _beams(self) -> int:
        return max(super()._beams(), self.best_of or 0) if self.use_beam_search else super()._beams()

    @property
    def drawn(self) -> int | None:
        """Choices to draw per prompt if they are to be ranked; None if all that are drawn are returned."""
        return self.best_of if self.best_of is not None and self.best_of > (self.n or 1) and not self._beams() else None

    def sampling(self, tokenizer: TokenizerLike) -> SamplingParams:
        """The engine's parameters; 16 tokens unless told otherwise, as OpenAI has it."""
        return self._sampling(
            max_tokens=DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
            tokenizer=tokenizer,
        )


class ChatFields(ApiRequest):
    """What makes a prompt out of messages; shared by chat and /tokenize."""

    messages: Any = None
    tools: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt can't both be true.", param="continue_final_message"
            )


class ChatRequest(ChatFields, GenerationRequest):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Any = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.", param="top_logprobs"
            )
        if (
            self.max_tokens is not None
            and self.max_completion_tokens is not None
            and self.max_tokens != self.max_completion_tokens
        ):
            raise InvalidRequestError(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens ({self.max_completion_tokens}) mean the "
                "same; give one.",
                param="max_tokens",
            )
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequestError(
                "Only 'none' and 'auto' are supported for 'tool_choice': output can't be forced into a tool call.",
                param="tool_choice",
                code="unsupported_value",
            )

    def sampling(self, tokenizer: TokenizerLike) -> SamplingParams:
        """The engine's parameters; without a limit the answer may fill the context."""
        return self._sampling(
            max_tokens=self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=None,
            tokenizer=tokenizer,
        )


class TokenizeRequest(ChatFields):
    """POST /tokenize: a prompt or messages, in vLLM's form."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("Exactly one of 'prompt' and 'messages' is needed.", param="prompt")


class ContextFields(ChatFields):
    """What a context is made of or grows by: a prompt or messages."""

    prompt: Any = None
    cache_salt: str | None = Field(default=None, min_length=1)

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("Exactly one of 'prompt' and 'messages' is needed.", param="prompt")
        for name in ("add_generation_prompt", "continue_final_message"):
            if getattr(self, name):
                raise InvalidRequestError(
                    f"'{name}' has no place here: a context ends with a whole message.", param=name
                )


class CreateRequest(ContextFields):
    """POST /v1/contexts."""

    ttl: float | None = Field(default=None, gt=0, le=MAX_TTL)
    add_special_tokens: bool | None = None


class WarmPromptFields(CreateRequest):
    """A line of a warm-up file."""

    tenant: str | None = None
    pin: bool | None = None

    def check(self) -> None:
        super().check()
        if self.ttl is not None and not self.pin:
            raise InvalidRequestError(
                "'ttl' needs 'pin': what isn't pinned stays until its pages are needed.", param="ttl"
            )


class PublicPrefixRequest(ContextFields):
    """POST /v1/admin/public_prefixes, and a line of a file of public prefixes."""

    add_special_tokens: bool | None = None

    def check(self) -> None:
        super().check()
        if self.cache_salt is not None:
            raise InvalidRequestError("'cache_salt' has no place here: it's public.", param="cache_salt")


class AppendRequest(ContextFields):
    """POST /v1/contexts/{id}/append."""

    def check(self) -> None:
        super().check()
        if self.tools is not None or self.chat_template_kwargs is not None:
            raise InvalidRequestError(
                "'tools' and 'chat_template_kwargs' are the context's; give them where it is made.", param="tools"
            )


class ForkRequest(ApiRequest):
    """POST /v1/contexts/{id}/fork."""

    n: int | None = None
    ttl: float | None = Field(default=None, gt=0, le=MAX_TTL)
    cache_salt: str | None = Field(default=None, min_length=1)


class DetokenizeRequest(ApiRequest):
    """POST /detokenize."""

    tokens: Any = None


_T = TypeVar("_T", int, str)


def json_type(value: object) -> str:
    """The JSON name of a decoded value's type, with its article."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "an integer"}
    return "null" if value is None else names.get(type(value), "a number")


def is_list_of(value: object, kind: type[_T]) -> bool:
    """Whether the value is a list with nothing but that type in it (a bool is no int)."""
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _first_error(error: ValidationError) -> InvalidRequestError:
    detail = error.errors(include_url=False, include_context=False)[0]
    location = [str(part) for part in detail["loc"]]
    param = ".".join(location) or None
    if detail["type"] == "extra_forbidden":
        return InvalidRequestError(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    value = detail["input"]
    shown = json_type(value)
    if type(value) in (int, float, bool) or (isinstance(value, str) and len(value) <= 40):
        shown = repr(value)
    is_type = detail["type"].endswith("_type")
    return InvalidRequestError(
        f"Invalid {'type' if is_type else 'value'} for '{param}': {detail['msg']}, got {shown}.",
        param=param,
        code="invalid_type" if is_type else "invalid_value",
    )


def _check_response_format(value: Any) -> None:
    if value is None:
        return
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequestError("'response_format' must be an object with a 'type'.", param="response_format")
    if kind != "text":
        raise InvalidRequestError(
            f"response_format '{kind[:40]}' is not supported: output can't be constrained; only 'text' is.",
            param="response_format",
            code="unsupported_value",
        )


def _stop_strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not is_list_of(value, str):
        raise InvalidRequestError("'stop' must be a string or an array of strings.", param="stop", code="invalid_type")
    return tuple(value)


def _token_list(value: Any, param: str, tokenizer: TokenizerLike) -> tuple[int, ...]:
    if value is None:
        return ()
    if not is_list_of(value, int):
        raise InvalidRequestError(f"'{param}' must be an array of integers.", param=param, code="invalid_type")
    tokenizer.check_ids(value, param=param)
    return tuple(value)


def _logit_bias(value: Any, tokenizer: TokenizerLike) -> Mapping[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequestError(
            "'logit_bias' must be an object of token ids and numbers.", param="logit_bias", code="invalid_type"
        )
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequestError(
                f"Keys of 'logit_bias' must be token ids, got '{key[:40]}'.", param="logit_bias", code="invalid_value"
            )
        if type(bias) not in (int, float):
            raise InvalidRequestError(
                f"Values of 'logit_bias' must be numbers, got {json_type(bias)} for token {key}.",
                param="logit_bias",
                code="invalid_type",
            )
        biases[int(key)] = float(min(max(bias, -1e9), 1e9))  # an int may not fit a float; the range is checked later
    tokenizer.check_ids(list(biases), param="logit_bias")
    return biases
