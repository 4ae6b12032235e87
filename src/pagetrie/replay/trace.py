from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass(slots=True)
class TraceRequest:
    time: float
    prompt_tokens: int
    output_tokens: int
    pages: list[int]


@dataclass(slots=True)
class Trace:
    page_tokens: int
    requests: list[TraceRequest] = field(default_factory=list)


def read_mooncake(path):
    t = Trace(512)
    for line in open(path):
        d = json.loads(line)
        t.requests.append(TraceRequest(d["timestamp"] / 1000, d["input_length"], d["output_length"], d["hash_ids"]))
    return t
