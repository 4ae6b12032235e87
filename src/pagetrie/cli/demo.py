"""``pagetrie demo``: many users on one system prompt, and what that costs with and without shared pages.

Three measurements on the real engine:

1. One user at a time, each on a prompt never seen before: the cold time to first token.
2. One user at a time, on a system prompt that is in the cache: the warm one.
3. All users at once, on a system prompt that nobody has computed yet: hit rate, pages held, unused slots.

The contiguous baseline runs the third one's requests through the same scheduler and the real contiguous manager, with
a runner that computes nothing: pages and seats depend on lengths alone, and these are equal.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from rich.box import ASCII, ROUNDED
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pagetrie.assembly import Parts, build, engine_config
from pagetrie.engine.engine import Engine
from pagetrie.engine.observer import AdmissionReport, EngineObserver, RejoinReport, StepReport, TokenReport
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.request import Request
from pagetrie.engine.runner import SequenceResult, StepPlan, TokenLogprob
from pagetrie.errors import ConfigError
from pagetrie.kv import ContiguousCacheManager, KVCache
from pagetrie.kv.holding import Holding
from pagetrie.kv.metering import MeteredCache
from pagetrie.settings import Settings, format_size

SAMPLES = 3
_QUESTIONS = (
    "How do I reset my password?",
    "My parcel is late. Where is it, and what can I do about it?",
    "Can I change the address of an order that I placed this morning?",
    "Which of your lamps would you recommend for a small room with a low ceiling, and why?",
    "I was charged twice.",
    "Please cancel my subscription at the end of the month.",
    "Does the warranty cover a cracked screen if it was dropped?",
)


@dataclass(slots=True)
class Measured(EngineObserver):
    """What was seen since ``clear``: per request and per step."""

    cache: MeteredCache | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated: int = 0
    preemptions: int = 0
    first_tokens: list[float] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)

    def clear(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.generated = self.preemptions = 0
        self.first_tokens.clear()
        self.holdings.clear()

    def on_admission(self, report: AdmissionReport) -> None:
        self.prompt_tokens += report.prompt_tokens
        self.cached_tokens += report.cached_tokens

    def on_rejoin(self, report: RejoinReport) -> None:
        self.cached_tokens += report.cached_tokens

    def on_token(self, report: TokenReport) -> None:
        self.generated += 1
        if report.first:
            self.first_tokens.append(report.gap)

    def on_step(self, report: StepReport) -> None:
        self.preemptions += report.preemptions
        if self.cache is not None:
            holding = self.cache.measure()
            if holding.pages:
                self.holdings.append(holding)

    def watch(self, cache: KVCache) -> MeteredCache:
        self.cache = MeteredCache(cache)
        return self.cache

    @property
    def peak_pages(self) -> int:
        return max((holding.pages for holding in self.holdings), default=0)

    @property
    def peak_users(self) -> int:
        return max((holding.leases for holding in self.holdings), default=0)

    @property
    def waste(self) -> float:
        """Unused slots over held slots, both summed over the steps."""
        slots = sum(holding.slots for holding in self.holdings)
        return 1 - sum(holding.used for holding in self.holdings) / slots if slots else 0.0


class BookkeepingRunner:
    """Computes nothing and draws one fixed token: for runs in which only pages and seats count."""

    def execute(self, plan: StepPlan) -> list[SequenceResult]:
        return [SequenceResult([TokenLogprob(0, 0.0) for _ in share.samples]) for share in plan.sequences]


def demo(settings: Settings, *, users: int, prompt_tokens: int, max_tokens: int) -> None:
    """Run the three measurements and the baseline, and print the table.

    Raises:
        ConfigError: the prompt and its answer don't fit the model's context.
        ModelLoadError: the model can't be used.
    """
    settings = settings.model_copy(
        update={
            "kv_layout": "paged",
            "max_num_seqs": max(settings.max_num_seqs, users),
            "max_num_batched_tokens": max(settings.max_num_batched_tokens, users),
            "max_queue": max(settings.max_queue, users),
        }
    )
    seen = Measured()
    parts = build(settings, make_observer=lambda *_: seen, wrap_cache=seen.watch)
    conversations = _Conversations(parts, prompt_tokens)
    crowd = [conversations.ask("the shop", user) for user in range(users)]
    longest = max(len(prompt) for prompt in crowd) + max_tokens
    if longest > parts.max_model_len:
        raise ConfigError(
            f"the demo needs {longest} tokens per user (prompt and answer), the context limit is {parts.max_model_len}"
        )
    with _Reporter(2 * SAMPLES + users) as report:
        report.stage(f"cold: {SAMPLES} prompts never seen before, one at a time")
        for sample in range(SAMPLES):
            _run(parts.engine, [conversations.ask(f"shop number {sample}", sample)], 1, report.advance)
        cold = statistics.median(seen.first_tokens)

        seen.clear()
        report.stage(f"warm: {SAMPLES} users on a prompt in the cache, one at a time")
        for sample in range(SAMPLES):
            _run(parts.engine, [conversations.ask("shop number 0", SAMPLES + sample)], 1, report.advance)
        warm = statistics.median(seen.first_tokens)

        seen.clear()
        parts.cache.reset()
        report.stage(f"crowd: {users} users at once on a prompt that nobody has computed")
        begin = time.monotonic()
        _run(parts.engine, crowd, max_tokens, report.advance)
        elapsed = time.monotonic() - begin
    baseline = _run_baseline(parts, crowd, max_tokens)
    _print(parts, seen, baseline, cold=cold, warm=warm, elapsed=elapsed, crowd=crowd)


class _Conversations:
    """Prompts as token ids: a system prompt of a given length and one short question each."""

    def __init__(self, parts: Parts, prompt_tokens: int) -> None:
        self._parts = parts
        self._prompt_tokens = prompt_tokens

    def ask(self, shop: str, user: int) -> list[int]:
        system = self._system_prompt(shop)
        question = f"I am customer {user}. {_QUESTIONS[user % len(_QUESTIONS)]}"
        template, tokenizer = self._parts.chat_template, self._parts.tokenizer
        if template is None:
            return tokenizer.encode(f"{system}\n\n{question}\n")
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        return tokenizer.encode(template.render(messages), add_special=False)

    def _system_prompt(self, shop: str) -> str:
        """House rules, one after another, cut to the wanted number of tokens. They differ from the first words on."""
        tokenizer = self._parts.tokenizer
        text = f"You answer the customers of {shop}. Follow the house rules."
        for rule in count(1):
            ids = tokenizer.encode(text, add_special=False)
            if len(ids) >= self._prompt_tokens:
                return tokenizer.decode(ids[: self._prompt_tokens])
            text += (
                f" Rule {rule}: when a customer asks about case {rule * 37 % 101}, look up page {rule} of the handbook,"
                " answer in two short sentences, promise nothing that the handbook does not, and stay friendly."
            )
        raise AssertionError("count() doesn't end")


def _run(engine: Engine, prompts: Sequence[list[int]], max_tokens: int, done: Callable[[], None]) -> None:
    """Add all prompts at once and step until every one has its tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    running = set()
    for number, prompt in enumerate(prompts):
        engine.add(Request(f"demo-{number}", prompt, params))
        running.add(f"demo-{number}")
    try:
        while running:
            for output in engine.step():
                if output.finished:
                    running.discard(output.request_id)
                    if output.error is not None:
                        raise output.error
                    done()
    finally:
        for request_id in running:
            engine.abort(request_id)


def _run_baseline(parts: Parts, prompts: Sequence[list[int]], max_tokens: int) -> Measured:
    """The same requests over contiguous reservations: the real manager and scheduler, nothing computed."""
    seen = Measured()
    cache = ContiguousCacheManager(
        num_pages=parts.cache.num_pages, page_size=parts.cache.page_size, max_tokens=parts.max_model_len
    )
    engine = Engine(
        runner=BookkeepingRunner(),
        cache=seen.watch(cache),
        vocabulary=parts.tokenizer,
        config=engine_config(parts.settings, parts.max_model_len),
        clock=time.monotonic,
        rng=random.Random(0),
        observer=seen,
    )
    _run(engine, prompts, max_tokens, lambda: None)
    return seen


def _print(
    parts: Parts,
    seen: Measured,
    baseline: Measured,
    *,
    cold: float,
    warm: float,
    elapsed: float,
    crowd: Sequence[list[int]],
) -> None:
    console = Console(highlight=False)
    users, pages = len(crowd), parts.cache.num_pages
    shared = _common_prefix(crowd)
    per_user = -(-parts.max_model_len // parts.cache.page_size)
    console.print(
        f"{parts.name}: {users} users, a shared prefix of {shared} tokens, prompts of "
        f"{min(map(len, crowd))} to {max(map(len, crowd))} tokens, {seen.generated // users} tokens each in answer. "
        f"Pool: {pages} pages of {parts.cache.page_size} tokens, {format_size(pages * parts.page_bytes)}.",
        soft_wrap=True,
    )
    box = ROUNDED if console.is_terminal else ASCII
    times = Table(box=box, title="Time to first token", title_justify="left")
    times.add_column("")
    times.add_column("median", justify="right")
    times.add_row("cold: alone, prompt never seen", f"{cold * 1e3:.0f} ms")
    times.add_row("warm: alone, system prompt cached", f"{warm * 1e3:.0f} ms")
    times.add_row(f"{users} at once, nothing cached before", f"{statistics.median(seen.first_tokens) * 1e3:.0f} ms")
    console.print(times)

    table = Table(box=box, title=f"{users} users at once", title_justify="left")
    table.add_column("")
    table.add_column("paged, shared", justify="right")
    table.add_column("contiguous", justify="right")
    for label, ours, theirs in (
        ("hit rate, prompt tokens", _percent(seen.cached_tokens / seen.prompt_tokens), _percent(0.0)),
        ("users running at once, peak", f"{seen.peak_users}", f"{baseline.peak_users}"),
        ("pages held, peak", f"{seen.peak_pages:,}", f"{baseline.peak_pages:,}"),
        (f"pages to hold all {users} at once", f"{seen.peak_pages:,}", f"{users * per_user:,}"),
        ("unused slots in held pages", _percent(seen.waste), _percent(baseline.waste)),
    ):
        table.add_row(label, ours, theirs)
    console.print(table)
    console.print(
        f"The crowd took {elapsed:.1f} s, {seen.generated / elapsed:.0f} tokens/s. "
        f"Contiguous: one reservation of {per_user} pages per user, the context limit of {parts.max_model_len} tokens.",
        soft_wrap=True,
    )


def _common_prefix(prompts: Sequence[list[int]]) -> int:
    shortest, longest = min(prompts), max(prompts)
    return next((i for i, (a, b) in enumerate(zip(shortest, longest, strict=False)) if a != b), len(shortest))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


class _Reporter:
    """Progress on stderr: a bar on a terminal, a line per stage elsewhere."""

    def __init__(self, total: int) -> None:
        console = Console(file=sys.stderr)
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=console, transient=True)
            self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> _Reporter:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def stage(self, text: str) -> None:
        if self._progress:
            self._progress.update(self._task, description=text)
        else:
            print(text, file=sys.stderr, flush=True)

    def advance(self) -> None:
        if self._progress:
            self._progress.advance(self._task)
