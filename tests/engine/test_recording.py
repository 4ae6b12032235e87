"""Recording requests for replay: what is written, what is equal, and that no text can be had from it."""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagetrie.engine.observer import ArrivalReport, FinishReport
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.recording import TraceRecorder
from pagetrie.errors import ConfigError
from pagetrie.replay.trace import read_trace


def arrive(recorder: TraceRecorder, name: str, time: float, ids: list[int], namespace: bytes = b"") -> None:
    recorder.on_arrival(ArrivalReport(name, time, ids, namespace, SamplingParams(), {}))


def finish(recorder: TraceRecorder, name: str, tokens: int, *, last: bool = True, output: Sequence[int] = ()) -> None:
    recorder.on_finish(
        FinishReport(name, "stop", 1, 9, 1, tokens, 0, 1.0, None, None, None, last_of_request=last, output_ids=output)
    )


def test_a_recording_can_be_replayed(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(file, 4)
    trunk = list(range(8))
    arrive(recorder, "a", 100.0, [*trunk, 50])
    arrive(recorder, "b", 100.5, [*trunk, 60, 61])
    arrive(recorder, "c", 101.0, [*trunk, 50], b"another tenant")
    arrive(recorder, "d", 102.0, [1])
    finish(recorder, "b", 3, last=False)
    finish(recorder, "b", 7)
    finish(recorder, "a", 5)
    finish(recorder, "c", 0)
    finish(recorder, "unknown", 0)
    recorder.close()
    trace = read_trace(file)
    assert trace.page_tokens == 4
    a, b, c = trace.requests
    assert (a.time, a.prompt_tokens, a.output_tokens) == (0.0, 9, 5)
    assert (b.time, b.prompt_tokens, b.output_tokens) == (0.5, 10, 7)
    assert a.pages[:2] == b.pages[:2] and a.pages[2] != b.pages[2]
    assert c.time == 1.0 and not set(c.pages) & set(a.pages)


def test_ids_depend_on_a_key_that_is_written_nowhere(tmp_path: Path) -> None:
    ids = []
    for number in range(2):
        recorder = TraceRecorder(tmp_path / str(number), 4)
        arrive(recorder, "a", 0.0, [1, 2, 3, 4, 5])
        finish(recorder, "a", 1)
        recorder.close()
        head, line = (tmp_path / str(number)).read_text().splitlines()
        assert json.loads(head) == {"pagetrie_trace": 1, "page_tokens": 4}
        assert set(json.loads(line)) == {"t", "in", "out", "pages"}
        ids += json.loads(line)["pages"]
    assert len(set(ids)) == 4 and all(len(page) == 16 for page in ids)


def test_the_file_is_its_owners_and_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    TraceRecorder(file, 4).close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="which exists"):
        TraceRecorder(file, 4)
    with pytest.raises(ConfigError, match="can't record"):
        TraceRecorder(tmp_path / "none" / "trace", 4)


def test_it_tells_which_pages_begin_alike_but_not_across_tenants(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(file, 4)
    first, turn = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 21]
    arrive(recorder, "a", 0.0, first)
    finish(recorder, "a", 4, output=[7, 8, 9, 10])
    arrive(recorder, "b", 1.0, turn)
    arrive(recorder, "c", 2.0, turn[:10], b"another tenant")
    finish(recorder, "b", 0)
    finish(recorder, "c", 0)
    recorder.close()
    trace = read_trace(file)
    a, b, c = trace.requests
    whole, prompt = trace.prompt_ids(a) + trace.answer_ids(a), trace.prompt_ids(b)
    assert len(whole) == 10 and len(prompt) == 11
    assert whole[:9] == prompt[:9] and whole[9] != prompt[9]
    assert not set(trace.prompt_ids(c)) & {*whole, *prompt}


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagetrie.engine.recording.KNOWN_TOKENS", 256)
    file = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(file, 4)
    prompts = [[number, *range(100, 100 + 4 * number)] for number in range(70)]
    for number, prompt in enumerate([*prompts, *prompts]):
        arrive(recorder, str(number), float(number), prompt)
        finish(recorder, str(number), 1, output=[1])
    recorder.close()
    trace = read_trace(file)
    assert [len(trace.prompt_ids(request)) for request in trace.requests] == [len(prompt) for prompt in prompts * 2]
    pairs = zip(trace.requests[:70], trace.requests[70:], strict=True)
    assert all(trace.prompt_ids(one) == trace.prompt_ids(again) for one, again in pairs)


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = TraceRecorder(tmp_path / "trace.jsonl", 4)
    tried = []

    def write(text: str) -> int:
        tried.append(text)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder._file, "write", write)
    for name in "ab":
        arrive(recorder, name, 1.0, [1, 2, 3, 4, 5])
        finish(recorder, name, 2)
    recorder.close()
    assert len(tried) == 1 and [record.getMessage() for record in caplog.records] == [
        "the recording ends here: No space left on device"
    ]
