"""The Python interface: a model, its engine, and batches of prompts on the caller's own thread.

with LLM("model.gguf", num_pages=2000) as llm:
    for result in llm.generate(["One prompt", "Another"], SamplingParams(max_tokens=32)):
        print(result.text, result.cached_tokens)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, cast

from pagetrie.assembly import build
from pagetrie.engine.contexts import Context as EngineContext
from pagetrie.engine.contexts import Contexts as EngineContexts
from pagetrie.engine.output import FinishReason, RequestOutput
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import ContextUse, Request
from pagetrie.engine.runner import TokenLogprob
from pagetrie.engine.tenant import Owner
from pagetrie.errors import DeadlineExceededError, InvalidRequestError, QueueFullError
from pagetrie.kv import CacheStats
from pagetrie.settings import load_settings
from pagetrie.terminal import between_steps, progress_bar
from pagetrie.text.chat_template import ChatTemplate
from pagetrie.text.transcript import Transcript

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
_T = TypeVar("_T")

_OWNER = Owner()
"""There is one owner of contexts in a process."""
_PREFILL = SamplingParams(max_tokens=0, temperature=0.0)

_LONGEST_WAIT = 0.1
"""Seconds after which a wait for pages looks whether Ctrl-C was pressed."""


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
        cached_by_tier: those of them that came from a tier below the pool, by its name.
        prompt_logprobs: one entry per prompt token, the first None, if asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    choices: list[Completion]
    cached_tokens: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    def take(self, output: RequestOutput) -> None:
        """Add what a step brought."""
        self.cached_tokens = output.cached_tokens
        self.cached_by_tier = dict(output.cached_by_tier)
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
            self._parts.engine.close()
            del self._parts

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
        progress: bool = True,
        contexts: Sequence[Context] | None = None,
        append: bool = False,
    ) -> list[RequestResult]:
        """Complete prompts, batched together, and return the results in the prompts' order.

        Args:
            prompts: a text, a list of texts, a list of token ids, or a list of such lists.
            params: for all prompts, or one per prompt; the defaults of ``SamplingParams`` if None.
            priority: of all prompts, or one per prompt; lower runs first.
            timeout: seconds for each prompt; one that takes longer ends with what it has, ``finish_reason`` "timeout".
            progress: show a bar on stderr, if that is a terminal.
            contexts: what each prompt goes on from, one per prompt; prompts may be empty then.
            append: these contexts become prompt and answer (one choice, no stop strings).

        Raises:
            InvalidRequestError: a prompt or its parameters can't be served; nothing was started.
            EngineError: the model failed; everything unfinished was aborted.
            KeyboardInterrupt: as pressed; everything was aborted and its pages given back.
        """
        prompts = _as_list(prompts)
        uses = None
        if contexts is not None:
            contexts = _per_prompt(contexts, len(prompts), "contexts")
            prompts = [[*c._core.ids, *self._encode(prompt)] for prompt, c in zip(prompts, contexts, strict=True)]
            uses = [context._use(append) for context in contexts]
        prepared = self._prepare(prompts, params, priority=priority, timeout=timeout, uses=uses)
        return self._run(*prepared, progress=progress)

    def context(self, prompt: Prompt | Sequence[Message], **template_variables: Any) -> Context:
        """Compute a prompt, or messages, and keep them until the context is closed.

        Raises:
            InvalidRequestError: it's too long, there are too many contexts, or nothing is shared with these settings.
            HoldLimitError: contexts would pin more than ``max_pinned`` of the pool.
        """
        if _are_messages(prompt):
            ids, chat = self._extend(Transcript(variables=template_variables), [], prompt, answer=False)
        else:
            ids, chat = self._encode(cast(Prompt, prompt), add_special=True), None
        engine = self._parts.engine
        with self._lock:
            context = Context(self, engine.contexts.create(_OWNER, ids, note=chat))
        try:
            self._generate(ids, _PREFILL, context._use(False))
            with self._lock:
                engine.contexts.secure(context._core)
        except BaseException:
            context.close()
            raise
        return context

    def cache_stats(self) -> CacheStats:
        """The pool's pages by state, and what has happened to them."""
        return self._parts.engine.cache_stats()

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
        template = self._template()
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
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
        templated: bool = False,
        uses: Sequence[ContextUse | None] | None = None,
    ) -> tuple[list[Request], list[RequestResult]]:
        params = _per_prompt(params or SamplingParams(), len(prompts), "params")
        priorities = _per_prompt(priority, len(prompts), "priorities")
        requests: list[Request] = []
        results: list[RequestResult] = []
        for prompt, own, rank, use in zip(prompts, params, priorities, uses or [None] * len(prompts), strict=True):
            # A rendered template brings its own special tokens.
            ids = self._encode(prompt, add_special=not templated)
            request = Request(f"llm-{next(self._ids)}", ids, own, priority=rank, timeout=timeout, context=use)
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
            results.append(RequestResult(request.request_id, text, ids, [Completion(index) for index in range(own.n)]))
        return requests, results

    def _generate(self, ids: list[int], params: SamplingParams, use: ContextUse) -> RequestResult:
        """One request on a context."""
        return self._run(*self._prepare([ids], params, uses=[use]), progress=False)[0]

    def _encode(self, prompt: Prompt, *, add_special: bool = False) -> list[int]:
        if isinstance(prompt, str):
            return self._parts.tokenizer.encode(prompt, add_special=add_special)
        return list(prompt)

    def _extend(
        self, chat: Transcript, ids: list[int], messages: Sequence[Any], *, answer: bool
    ) -> tuple[list[int], Transcript]:
        plain = [dict(message) for message in messages]
        return chat.extend(ids, plain, self._template().render, self._encode, answer=answer)

    def _template(self) -> ChatTemplate:
        if self._parts.chat_template is None:
            raise InvalidRequestError("this model has no chat template; pass chat_template=PATH or use generate()")
        return self._parts.chat_template

    def _run(self, requests: list[Request], results: list[RequestResult], *, progress: bool) -> list[RequestResult]:
        engine = self._parts.engine
        waiting = deque(requests)
        running = {result.request_id: result for result in results}
        bar = progress_bar() if progress else None
        with self._lock, bar or nullcontext(), between_steps() as check_interrupt:
            task = bar.add_task("generate", total=len(results), tokens=0) if bar else None
            tokens = 0
            arrived = threading.Event()
            engine.set_waker(arrived.set)
            try:
                while running:
                    check_interrupt()
                    _feed(engine.add, waiting)
                    arrived.clear()
                    pause = engine.pause()
                    if pause:  # pages are on their way from a tier
                        arrived.wait(min(pause, _LONGEST_WAIT))
                        continue
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


class Context:
    """A prompt that stays in the cache until it's closed. Made by ``LLM.context`` and ``fork``.

    Its pages are kept from eviction as long as others can run beside them. Where they had to go, the next use computes
    them again: the text is the same.
    """

    def __init__(self, llm: LLM, core: EngineContext) -> None:
        self._llm = llm
        self._core = core

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def token_ids(self) -> list[int]:
        """What a request on it starts with."""
        return list(self._core.ids)

    @property
    def held_tokens(self) -> int:
        """How many of them are safe from eviction now."""
        return self._core.held_tokens

    @property
    def pages(self) -> int:
        """Pages it stands on; others may stand on them too."""
        return self._core.pages

    def fork(self, n: int = 1) -> list[Context]:
        """As many new contexts at the same place. Nothing is computed or copied.

        Raises:
            InvalidRequestError: n is out of range, there are too many contexts, or this one is closed.
        """
        with self._llm._lock:
            return [Context(self._llm, core) for core in self._contexts.fork(_OWNER, self._core.id, n)]

    def append(self, prompt: Prompt | Sequence[Message]) -> None:
        """Compute more of it: a text, token ids, or messages if it was made from messages.

        Raises:
            InvalidRequestError: it would be too long, or holds no messages to add to.
        """
        chat = None
        if _are_messages(prompt):
            ids, chat = self._llm._extend(self._chat(), self._core.ids, prompt, answer=False)
        else:
            ids = [*self._core.ids, *self._llm._encode(cast(Prompt, prompt))]
        self._llm._generate(ids, _PREFILL, self._use(True, chat))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] = "",
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        append: bool = False,
        progress: bool = False,
    ) -> list[RequestResult]:
        """Go on from it, with a prompt or without one; several prompts go on from the same place.

        Args:
            prompts, params, progress: as for ``LLM.generate``.
            append: it becomes its prompt and the answer; for one prompt, one choice and no stop strings.
        """
        many = _as_list(prompts)
        return self._llm.generate(many, params, progress=progress, contexts=[self] * len(many), append=append)

    def chat(
        self, messages: Sequence[Message] = (), params: SamplingParams | None = None, *, append: bool = False
    ) -> RequestResult:
        """Answer its messages and these.

        Raises:
            InvalidRequestError: it wasn't made from messages.
        """
        ids, chat = self._llm._extend(self._chat(), self._core.ids, messages, answer=True)
        return self._llm._generate(ids, params or SamplingParams(), self._use(append, chat))

    def close(self) -> None:
        """Give its pages back. Closing twice is fine, also after the model was closed."""
        if hasattr(self._llm, "_parts"):
            with self._llm._lock, suppress(InvalidRequestError):  # closed already
                self._contexts.delete(_OWNER, self._core.id)

    @property
    def _contexts(self) -> EngineContexts:
        return self._llm._parts.engine.contexts

    def _chat(self) -> Transcript:
        if not isinstance(self._core.note, Transcript):
            raise InvalidRequestError("this context holds a plain prompt, no messages; use generate() or append text")
        return self._core.note

    def _use(self, append: bool, chat: Transcript | None = None) -> ContextUse:
        def note(answer: str) -> object:
            return chat.answered(answer) if chat is not None and answer else chat

        return ContextUse(self._core.id, _OWNER, append, self._core.version, note)


def _are_messages(prompt: Sequence[Any]) -> TypeGuard[Sequence[Message]]:
    """Whether these are messages, not a text or token ids."""
    return bool(prompt) and not isinstance(prompt, str) and all(isinstance(item, Mapping) for item in prompt)


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
