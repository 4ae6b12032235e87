"""Recording requests for replay: what is written, what is equal, and that no text can be had from it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from pagetrie.engine.observer import ArrivalReport, FinishReport
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.recording import TraceRecorder
from pagetrie.errors import ConfigError
from pagetrie.replay.trace import read_trace


def arrive(recorder: TraceRecorder, name: str, time: float, ids: list[int], namespace: bytes = b"") -> None:
    recorder.on_arrival(ArrivalReport(name, time, ids, namespace, SamplingParams(), {}))


def finish(recorder: TraceRecorder, name: str, tokens: int, *, last: bool = True) -> None:
    recorder.on_finish(FinishReport(name, "stop", 1, 9, 1, tokens, 0, 1.0, None, None, None, last_of_request=last))


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
