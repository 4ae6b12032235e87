"""The Python interface: a model, its engine, and batches of prompts on the caller's own thread.

with LLM("model.gguf", num_pages=2000) as llm:
    for result in llm.generate(["One prompt", "Another"], SamplingParams(max_tokens=32)):
        print(result.text, result.cached_tokens)
"""

from __future__ import annotations

import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pagetrie.assembly import build
from pagetrie.engine.output import FinishReason, RequestOutput
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.engine.runner import TokenLogprob
from pagetrie.errors import DeadlineExceededError, InvalidRequestError, QueueFullError
from pagetrie.settings import load_settings

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
_T = TypeVar("_T", int, SamplingParams)


@dataclass(slots=True)
class Completion:
    """One finished choice. ``logprobs`` has one entry per token id if the parameters asked for it, else none."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestResult:
    """All that came of one prompt.

    Attributes:
        prompt: the text, after the chat template if there was one; None if token ids were given.
        prompt_token_ids: what the model saw.
        choices: ``params.n`` of them, by index.
        cached_tokens: prompt tokens whose keys and values were there already.
        prompt_logprobs: one entry per prompt token, the first None, if asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    choices: list[Completion]
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    def take(self, output: RequestOutput) -> None:
        """Add what a step brought."""
        self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        for delta in output.choices:
            choice = self.choices[delta.index]
            choice.text += delta.text
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs
            choice.finish_reason = delta.finish_reason or choice.finish_reason
            choice.stop_reason = delta.stop_reason if delta.stop_reason is not None else choice.stop_reason


class LLM:
    """A model in this process.

    Args:
        path: a GGUF file or a Hugging Face folder; None takes the bundled model.
        config: a TOML file with settings. No file is read unless named.
        settings: options of ``pagetrie serve`` by their names with underscores; they beat ``PAGETRIE_*`` variables.

    Raises:
        ConfigError: an unknown option or a bad value.
        ModelLoadError: the model can't be used.
    """

    def __init__(self, path: str | Path | None = None, *, config: str | Path | None = None, **settings: Any) -> None:
        if path is not None:
            settings["model"] = path
        options = load_settings(settings, Path(config) if config is not None else None, default_file=False)
        self._parts = build(options)
        self._ids = count()
        self._lock = threading.Lock()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the model and its memory. The object can't be used afterwards; closing twice is fine."""
        if hasattr(self, "_parts"):
            del self._parts

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
        progress: bool = True,
    ) -> list[RequestResult]:
        """Complete prompts, batched together, and return the results in the prompts' order.

        Args:
            prompts: a text, a list of texts, a list of token ids, or a list of such lists.
            params: for all prompts, or one per prompt; the defaults of ``SamplingParams`` if None.
            priority: of all prompts, or one per prompt; lower runs first.
            timeout: seconds for each prompt; one that takes longer ends with what it has, ``finish_reason`` "timeout".
            progress: show a bar on stderr, if that is a terminal.

        Raises:
            InvalidRequestError: a prompt or its parameters can't be served; nothing was started.
            EngineError: the model failed; everything unfinished was aborted.
            KeyboardInterrupt: as pressed; everything was aborted and its pages given back.
        """
        prepared = self._prepare(_as_list(prompts), params, priority=priority, timeout=timeout)
        return self._run(*prepared, progress=progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
        progress: bool = True,
        **template_variables: Any,
    ) -> list[RequestResult]:
        """Answer a conversation, or several at once, through the model's chat template.

        Args:
            messages: OpenAI-style messages (``{"role": "user", "content": "..."}``), or a list of conversations.
            params, priority, timeout, progress: as for ``generate``.
            template_variables: passed on to the template.

        Raises:
            InvalidRequestError: also if the model has no chat template.
        """
        template = self._parts.chat_template
        if template is None:
            raise InvalidRequestError("this model has no chat template; pass chat_template=PATH or use generate()")
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        texts = [
            template.render([dict(m) for m in conversation], **template_variables) for conversation in conversations
        ]
        prepared = self._prepare(texts, params, priority=priority, timeout=timeout, templated=True)
        return self._run(*prepared, progress=progress)

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        priority: int | Sequence[int],
        timeout: float | None,
        templated: bool = False,
    ) -> tuple[list[Request], list[RequestResult]]:
        params = _per_prompt(params or SamplingParams(), len(prompts), "params")
        priorities = _per_prompt(priority, len(prompts), "priorities")
        requests: list[Request] = []
        results: list[RequestResult] = []
        for prompt, own, rank in zip(prompts, params, priorities, strict=True):
            # A rendered template brings its own special tokens.
            ids = self._parts.tokenizer.encode(prompt, add_special=not templated) if isinstance(prompt, str) else prompt
            request = Request(f"llm-{next(self._ids)}", list(ids), own, priority=rank, timeout=timeout)
            try:
                self._parts.engine.validate(request)
            except InvalidRequestError as error:
                if len(prompts) == 1:
                    raise
                raise InvalidRequestError(
                    f"prompt {len(requests)}: {error.message}", param=error.param, code=error.code
                ) from error
            text = prompt if isinstance(prompt, str) else None
            requests.append(request)
            results.append(
                RequestResult(request.request_id, text, list(ids), [Completion(index) for index in range(own.n)])
            )
        return requests, results

    def _run(self, requests: list[Request], results: list[RequestResult], *, progress: bool) -> list[RequestResult]:
        engine = self._parts.engine
        waiting = deque(requests)
        running = {result.request_id: result for result in results}
        bar = _progress_bar() if progress else None
        with self._lock, bar or nullcontext(), _between_steps() as check_interrupt:
            task = bar.add_task("generate", total=len(results), tokens=0) if bar else None
            tokens = 0
            try:
                while running:
                    check_interrupt()
                    _feed(engine.add, waiting)
                    for output in engine.step():
                        result = running[output.request_id]
                        result.take(output)
                        if output.finished:
                            del running[output.request_id]
                            if output.error is not None and not isinstance(output.error, DeadlineExceededError):
                                raise output.error
                        tokens += sum(len(delta.token_ids) for delta in output.choices)
                        if bar and task is not None:
                            bar.update(task, completed=len(results) - len(running), tokens=tokens)
            finally:
                for request_id in running:
                    engine.abort(request_id)
        return results


def _feed(add: Any, waiting: deque[Request]) -> None:
    """Give the engine as many requests as its queue takes."""
    while waiting:
        try:
            add(waiting[0])
        except QueueFullError:
            return
        waiting.popleft()


def _per_prompt(value: _T | Sequence[_T], count: int, name: str) -> Sequence[_T]:
    """One value for each prompt. Raises InvalidRequestError for a list of another length."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{count} prompts need as many {name}, got {len(value)}")
    return value


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, whether one prompt was given or several. Numbers are one prompt's token ids."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [token for token in prompts if isinstance(token, int)]
    if not ids:
        return [prompt for prompt in prompts if not isinstance(prompt, int)]
    if len(ids) < len(prompts):
        raise InvalidRequestError("prompts mixes token ids with texts or lists", param="prompt")
    return [ids]


def _progress_bar() -> Progress | None:
    """A bar on stderr, or None where no terminal would show it."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        return None
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


@contextmanager
def _between_steps() -> Iterator[Any]:
    """Hold Ctrl-C back until the running step has ended, so that the engine's books always balance.

    Yields a function that raises KeyboardInterrupt if one came. A second Ctrl-C isn't held back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # signals go to the main thread
        return
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler:
        yield lambda: None  # somebody else decides what Ctrl-C means
        return
    pressed = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            signal.default_int_handler(number, frame)
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)
    check()
