"""The Python interface, on the real model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import pagetrie
from pagetrie import LLM, SamplingParams
from pagetrie.engine.output import RequestOutput
from pagetrie.errors import ConfigError, InvalidRequestError, ModelLoadError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(bundled_model: Path) -> Iterator[LLM]:
    with LLM(bundled_model, threads=1, num_pages=64, max_queue=3, max_num_seqs=4, max_num_batched_tokens=64) as made:
        yield made


@pytest.fixture(autouse=True)
def pages_come_back(llm: LLM) -> Iterator[None]:
    """Whatever a test does: afterwards nothing runs and no page is held."""
    yield
    assert not llm._parts.engine.has_work
    assert llm._parts.cache.stats().active_pages == 0
    llm._parts.cache.check()


def test_results_come_in_the_order_of_the_prompts_and_equal_solo_runs(llm: LLM) -> None:
    prompts = [f"The number {n} comes before the number" for n in range(7)]  # more than the queue takes
    together = llm.generate(prompts, GREEDY)
    assert [result.prompt for result in together] == prompts
    assert all(result.choices[0].finish_reason == "length" for result in together)
    assert all(len(result.choices[0].token_ids) == 8 for result in together)
    alone = [llm.generate(prompt, GREEDY)[0].text for prompt in prompts]
    assert [result.text for result in together] == alone
    assert len(set(alone)) > 1


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    text = "The capital of France is"
    (by_text,) = llm.generate(text, GREEDY)
    ids = by_text.prompt_token_ids
    (by_ids,) = llm.generate(ids, GREEDY)
    both = llm.generate([ids, ids[:-1]], GREEDY)
    assert by_ids.prompt is None
    assert by_ids.prompt_token_ids == ids
    assert by_ids.text == by_text.text == both[0].text
    assert both[1].prompt_token_ids == ids[:-1]


def test_each_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    long, short = llm.generate(["One,", "One,"], [GREEDY, SamplingParams(temperature=0.0, max_tokens=2)])
    assert len(long.choices[0].token_ids) == 8
    assert long.choices[0].token_ids[:2] == short.choices[0].token_ids


def test_time_that_is_up_ends_a_prompt_with_what_it_has(llm: LLM) -> None:
    results = llm.generate(["One", "Two"], GREEDY, timeout=1e-6, priority=[0, 1])
    assert [result.choices[0].finish_reason for result in results] == ["timeout"] * 2
    assert all(result.text == "" for result in results)
    with pytest.raises(InvalidRequestError, match="2 prompts need as many priorities, got 1"):
        llm.generate(["One", "Two"], GREEDY, priority=[0])
    with pytest.raises(InvalidRequestError, match="timeout must be more than 0"):
        llm.generate("One", GREEDY, timeout=0)


def test_choices_logprobs_and_cached_tokens_are_told(llm: LLM) -> None:
    prompt = "A list of colours that many people like: red, green, blue, yellow and"
    params = SamplingParams(n=2, seed=7, max_tokens=4, logprobs=2, ignore_eos=True)
    (cold,) = llm.generate(prompt, params)
    (warm,) = llm.generate(prompt, params)
    assert cold.cached_tokens == 0
    assert 0 < warm.cached_tokens < len(warm.prompt_token_ids)
    assert [choice.index for choice in warm.choices] == [0, 1]
    for choice in warm.choices:
        assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
        assert all(len(entry.top) == 2 for entry in choice.logprobs)


def test_a_stop_string_ends_the_text_before_itself(llm: LLM) -> None:
    (result,) = llm.generate("1, 2, 3, 4,", SamplingParams(temperature=0.0, max_tokens=30, stop=" 7"))
    choice = result.choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", " 7")
    assert choice.text == " 5, 6,"


def test_chat_answers_one_conversation_or_several(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "What is 2+2?"}]
    (answer,) = llm.chat(conversation, SamplingParams(temperature=0.0, max_tokens=30))
    assert " 4" in answer.text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.prompt is not None
    assert answer.prompt.endswith("<|im_start|>assistant\n")
    other = [{"role": "user", "content": "Say hello."}]
    two = llm.chat([conversation, other], SamplingParams(temperature=0.0, max_tokens=30))
    assert two[0].text == answer.text
    assert two[1].text != answer.text


def test_a_context_is_computed_once_and_forked_without_a_copy(llm: LLM) -> None:
    trunk = "The four seasons are spring, summer, autumn and winter. " * 4
    questions = [f"{name} is the season in which" for name in ("Spring", "Summer", "Autumn", "Winter")]
    stats = llm._parts.cache.stats
    with llm.context(trunk) as context:
        assert context.held_tokens == len(context.token_ids)
        assert stats().active_pages == context.pages == -(-len(context.token_ids) // 16)
        forks = context.fork(4)
        assert stats().active_pages == context.pages
        results = llm.generate(questions, GREEDY, contexts=forks, append=True)
        assert all(result.cached_tokens == len(context.token_ids) for result in results)
        assert stats().active_pages < context.pages + 4 * 3
        for fork, result in zip(forks, results, strict=True):
            assert fork.token_ids == result.prompt_token_ids + result.choices[0].token_ids
            (again,) = llm.generate([result.prompt_token_ids], GREEDY)
            assert again.text == result.text
        (more,) = forks[0].generate(" So", GREEDY)
        assert more.cached_tokens >= len(forks[0].token_ids) - 1
        for fork in forks:
            fork.close()
            fork.close()
    with pytest.raises(InvalidRequestError, match="no context"):
        context.generate("x")


def test_a_chat_context_grows_by_messages_and_answers(llm: LLM) -> None:
    system = {"role": "system", "content": "You are a helpful assistant. Be brief."}
    turns = [{"role": "user", "content": "What is 2+2?"}, {"role": "user", "content": "And 3+3?"}]
    params = SamplingParams(temperature=0.0, max_tokens=30)
    with llm.context([system]) as context:
        before = len(context.token_ids)
        first = context.chat(turns[:1], params, append=True)
        assert first.cached_tokens >= before
        assert first.text == llm.chat([system, turns[0]], params)[0].text
        grown = context.token_ids
        second = context.chat(turns[1:], params)
        history = [system, turns[0], {"role": "assistant", "content": first.text}, turns[1]]
        (whole,) = llm.chat(history, params)
        assert second.prompt_token_ids == whole.prompt_token_ids
        assert second.text == whole.text
        assert second.cached_tokens >= len(grown) - 1
        assert context.token_ids == grown
        context.append(turns[1:])
        assert context.chat((), params).text == whole.text
        context.append(" and more")
        with pytest.raises(InvalidRequestError, match="holds a plain prompt"):
            context.chat(turns[:1])


def test_contexts_that_make_no_sense_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="takes 50 pages, but all pinned prefixes together may take 32"):
        llm.context([1] * 800)
    with llm.context("abc") as context:
        with pytest.raises(InvalidRequestError, match="2 prompts need as many contexts, got 1"):
            llm.generate(["a", "b"], contexts=[context])
        with pytest.raises(InvalidRequestError, match="can be appended"):
            context.generate("d", SamplingParams(n=2), append=True)
        with pytest.raises(InvalidRequestError, match="n must be between"):
            context.fork(0)
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        llm.context([1, 2, 10**6])


def test_nothing_in_nothing_out(llm: LLM) -> None:
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ("", GREEDY, "the prompt is empty"),
        ([[]], GREEDY, "the prompt is empty"),
        (["fine", ""], GREEDY, "prompt 1: the prompt is empty"),
        ([[1, 2, 10**6]], GREEDY, "1000000"),
        ([1, "two"], GREEDY, "mixes"),
        ([[1] * 2000], GREEDY, "2000"),
        (["a", "b"], [GREEDY], "2 prompts need as many params, got 1"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    llm: LLM, prompts: list[str], params: SamplingParams | list[SamplingParams], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate(prompts, params)


def _press_after(llm: LLM, monkeypatch: pytest.MonkeyPatch, steps: int) -> list[int]:
    """Send this process SIGINT from within the given step; the list grows by one with every finished step."""
    finished: list[int] = []
    step = llm._parts.engine.step

    def pressing() -> list[RequestOutput]:
        if len(finished) + 1 == steps:
            os.kill(os.getpid(), signal.SIGINT)
        outputs = step()
        finished.append(len(outputs))
        return outputs

    monkeypatch.setattr(llm._parts.engine, "step", pressing)
    return finished


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal, also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_for_the_step_and_gives_the_pages_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = _press_after(llm, monkeypatch, steps=3)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["One", "Two", "Three", "Four", "Five"], SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(finished) == 3
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.undo()
    assert llm.generate("One", GREEDY)[0].choices[0].finish_reason == "length"


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_in_the_very_last_step_is_not_lost(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    _press_after(llm, monkeypatch, steps=1)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("One", SamplingParams(max_tokens=1, ignore_eos=True))


def test_other_threads_take_turns(llm: LLM) -> None:
    texts: dict[int, str] = {}

    def work(number: int) -> None:
        texts[number] = llm.generate("The sky is", GREEDY)[0].text

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 3
    assert len(set(texts.values())) == 1


def test_without_a_terminal_nothing_is_printed(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate("One", GREEDY, progress=True)
    assert capsys.readouterr() == ("", "")


def test_a_bad_setting_or_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown option 'num_page'; did you mean 'num_pages'"):
        LLM(num_page=3)
    with pytest.raises(ModelLoadError, match="no such file"):
        LLM(tmp_path / "none.gguf")


def test_the_package_is_light_until_its_names_are_used() -> None:
    program = (
        "import sys, pagetrie\n"
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules\n"
        "from pagetrie import SamplingParams\n"
        "assert 'torch' not in sys.modules\n"
        "assert SamplingParams().n == 1 and dir(pagetrie) == sorted(pagetrie.__all__)\n"
        "pagetrie.nothing\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(pagetrie.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stderr.endswith("AttributeError: module 'pagetrie' has no attribute 'nothing'\n"), done.stderr
