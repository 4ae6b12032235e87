"""``pagetrie plan``: what fits, how fast it can be, and what a miss costs."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from pagetrie.cli.charts import Chart, console, plot, table
from pagetrie.errors import ConfigError
from pagetrie.kv.tiers.codec import CodecName, share_of_fp16
from pagetrie.plan.devices import DEVICES, Device
from pagetrie.plan.estimate import WEIGHT_BITS, Efficiency, Load, Planner
from pagetrie.plan.measure import StepRecorder, Timings, measure
from pagetrie.plan.shapes import SHAPES, Shape, shape_from_config
from pagetrie.replay.engine import CostModel
from pagetrie.settings import Settings, format_size, parse_size
from pagetrie.sim import StepCost

THIS = "this"
BUNDLED = "smollm2-135m"
"""The shape of the model that comes along."""
CODECS = ("fp16", "int8", "k8v4", "int4", "int2")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked; see ``pagetrie plan --help``."""

    model: str
    device: str
    devices: int
    weights: str
    weight_bytes: int | None
    prompt: int
    output: int
    spread: float
    shared: int
    context: int | None
    page_size: int
    batches: tuple[int, ...]


def read_size(text: str) -> int:
    """Bytes from "38GB". Raises ConfigError."""
    try:
        return int(str(parse_size(text)))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def find_shape(model: str) -> tuple[Shape, int | None]:
    """A shape by its name or from a file, and the bytes of its weights if the file has them.

    Raises:
        ConfigError: neither a known name nor a readable file.
        ModelLoadError: a broken GGUF file.
    """
    known = SHAPES.get(model.lower())
    if known is not None:
        return known, None
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return _gguf_shape(path)
    if path.exists():
        return shape_from_config(path), None
    raise ConfigError(f"no known shape and no file {model!r}; known are {', '.join(SHAPES)}")


def _gguf_shape(path: Path) -> tuple[Shape, int]:
    from pagetrie.models.gguf_file import GgufFile  # imports torch

    file = GgufFile(path)
    metadata, architecture = file.metadata, str(file.metadata.get("general.architecture", ""))

    def size(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{architecture}.{key}", default)
        if not isinstance(value, int) or not 0 < value < 1 << 31:
            raise ConfigError(f"{path}: {architecture}.{key} must be a whole number above 0, got {value!r}")
        return value

    layers, hidden, heads = size("block_count"), size("embedding_length"), size("attention.head_count")
    parameters = float(sum(math.prod(tensor.shape) for tensor in file.tensors.values()))
    experts = metadata.get(f"{architecture}.expert_count")
    if experts:
        raise ConfigError(f"{path}: with experts, give the config.json instead, which tells how many a token passes")
    window = metadata.get(f"{architecture}.attention.sliding_window")
    window = window if isinstance(window, int) and window > 0 else 0
    # Gemma 3 has a global layer after five windowed ones; other files give a window to all layers.
    windowed = 0 if not window else layers - layers // 6 if architecture == "gemma3" else layers
    shape = Shape(
        path.stem, parameters, parameters, layers, hidden, heads, size("attention.head_count_kv", heads),
        size("attention.key_length", hidden // heads), size("context_length", 8192), 0, window, windowed,
    )  # fmt: skip
    return shape, path.stat().st_size


def find_device(name: str, count: int) -> Device:
    """Raises ConfigError if it isn't known."""
    device = DEVICES.get(name.lower())
    if device is None:
        raise ConfigError(f"no known device {name!r}; known are {', '.join(DEVICES)}, and {THIS} for this machine")
    return device.times(count)


def weight_bytes(shape: Shape, weights: str) -> float:
    """Raises ConfigError if the format isn't known."""
    if weights not in WEIGHT_BITS:
        raise ConfigError(f"no known format of weights {weights!r}; known are {', '.join(WEIGHT_BITS)}")
    return shape.parameters * WEIGHT_BITS[weights] / 8


def cost_model(model: str, device: str, devices: int, weights: str, step_cost: str | None) -> CostModel:
    """What a step takes, for replay: three numbers, or the rooflines of a model on a device.

    Raises:
        ConfigError: unknown names, or not three numbers.
    """
    if step_cost is not None:
        try:
            per_step, per_token, per_attended = (float(part) for part in step_cost.split(","))
        except ValueError:
            raise ConfigError(
                f"--step-cost takes three numbers, such as 0.008,0.0015,1e-7; got {step_cost!r}"
            ) from None
        if not (per_step > 0 and per_token >= 0 and per_attended >= 0 and per_step + per_token < math.inf):
            raise ConfigError(f"--step-cost: a step takes more than 0 seconds, a token at least 0; got {step_cost!r}")
        return StepCost(per_step, per_token, per_attended)
    if device == THIS:
        return measure_this(model)
    shape, stored = find_shape(model)
    return Planner(shape, find_device(device, devices), stored or weight_bytes(shape, weights))


def token_bytes(model: str) -> int:
    """Bytes of one token's keys and values in fp16, over all layers. Raises ConfigError."""
    shape, _ = find_shape(model)
    return shape.values_per_token() * 2


def ram_share(model: str, codec: str) -> float:
    """Bytes of a page in memory with a codec, as a share of those in fp16.

    Raises:
        ConfigError: no such codec or model, or one whose pages aren't keys and values by head.
    """
    shape, _ = find_shape(model)
    for name in get_args(CodecName):
        if name == codec:
            if shape.latent and name != "none":
                raise ConfigError(f"the codec {codec} is for keys and values by head; {model} keeps a latent vector")
            return share_of_fp16(name, shape.head_dim)
    raise ConfigError(f"no codec {codec!r} for memory; there are {', '.join(get_args(CodecName))}")


def plan(question: Question, *, as_json: bool, file: Path | None) -> None:
    """Answer and print; draw into ``file`` if one is given.

    Raises:
        ConfigError: something isn't known, doesn't fit, or contradicts itself.
        ModelLoadError: for this machine, the model can't be run.
    """
    answer = answer_of(question)
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        _show(console(), answer)
    plot(console(stderr=as_json), _charts(answer), file)


def answer_of(question: Question) -> dict[str, Any]:
    """All figures, by name; sizes in bytes and times in seconds. Raises as ``plan`` does."""
    timings: Timings | None = None
    shape, stored = find_shape(question.model)
    bytes_of_weights = question.weight_bytes or stored or weight_bytes(shape, question.weights)
    if question.device == THIS:
        timings = measure_this(question.model)
        device = this_device(shape, bytes_of_weights, timings)
        planner = Planner(shape, device, bytes_of_weights, Efficiency(compute=1.0, bandwidth=1.0))
    else:
        planner = Planner(shape, find_device(question.device, question.devices), bytes_of_weights)
    context = min(question.context or shape.context, shape.context)
    load = Load(question.prompt, question.output, question.spread, question.shared, context, question.page_size)
    ttft = timings.ttft if timings else planner.ttft
    tpot = timings.tpot if timings else planner.tpot
    prefix = question.shared or question.prompt * 9 // 10
    miss = ttft(question.prompt, 0) - ttft(question.prompt - prefix, prefix) if prefix < question.prompt else 0.0
    prefix_bytes = planner.sequence_bytes(prefix, "fp16")
    return {
        "model": asdict(shape),
        "device": asdict(planner.device),
        "measured": asdict(timings) if timings else None,
        "weight_bytes": bytes_of_weights,
        "cache_bytes": planner.cache_bytes,
        "load": asdict(load),
        "context_bytes": planner.sequence_bytes(context, "fp16"),
        "fits": [asdict(planner.fit(load, codec)) for codec in CODECS],
        "ttft": {"cold": ttft(question.prompt, 0), "warm": ttft(max(question.prompt - prefix, 1), prefix)},
        "tpot": {str(batch): tpot(batch, question.prompt + question.output // 2) for batch in question.batches},
        "miss": {
            "prefix_tokens": prefix,
            "seconds": miss,
            "bytes": prefix_bytes,
            "worthwhile_bandwidth": prefix_bytes / miss if miss > 0 else None,
        },
    }


def measure_this(model: str) -> Timings:
    """Run a model on this machine for some seconds.

    Raises:
        ConfigError: it is only a shape.
        ModelLoadError: it can't be used.
    """
    from pagetrie.assembly import build  # imports torch

    if model in SHAPES and model != BUNDLED:
        raise ConfigError(f"only a model at hand can be measured, and {model} is only a shape; name a device")
    recorder = StepRecorder()
    settings = Settings(model=None if model == BUNDLED else Path(model), num_pages=1024)
    parts = build(settings, make_observer=lambda *_: recorder)
    return measure(parts.engine, recorder, parts.config.vocab_size)


def this_device(shape: Shape, bytes_of_weights: float, timings: Timings) -> Device:
    """This machine, with the rates that the measured steps reached."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    alone = timings.tpot(1, 1)
    per_token = timings.prefill.per_token or timings.ttft(256) / 256
    return Device("this machine", memory, bytes_of_weights / alone, 2 * shape.active / per_token)


def _show(out: Console, answer: dict[str, Any]) -> None:
    shape, device, load, fits = answer["model"], answer["device"], answer["load"], answer["fits"]
    whole = format_size(round(answer["context_bytes"]))
    out.print(
        f"{shape['name']} on {device['name']}: {shape['parameters'] / 1e9:.3g} B parameters, "
        f"{answer['weight_bytes'] / 1e9:.3g} GB of weights; {answer['cache_bytes'] / 1e9:.3g} GB are left for the "
        f"cache. A whole context of {load['context']:,} tokens takes {whole} in fp16.",
        highlight=False,
    )
    spread = f", spread {load['spread']:g}" if load["spread"] else ""
    shared = f", {load['shared']:,} tokens shared" if load["shared"] else ""
    table(
        out,
        f"sequences at once: prompt {load['prompt']:,}, answer {load['output']:,} (medians{spread}){shared}; "
        f"pages of {load['page']}",
        ["keys and values", "per token", "tokens", "contiguous", "paged", "paged, shared"],
        [
            [
                fit["codec"],
                format_size(round(fit["bytes_per_token"])),
                *(f"{fit[key]:,}" for key in ("tokens", "contiguous", "paged", "shared")),
            ]
            for fit in fits
        ],
    )
    miss = answer["miss"]
    how = "measured" if answer["measured"] else "at best"
    rows = [
        [f"first token, {load['prompt']:,} new tokens", _seconds(answer["ttft"]["cold"])],
        [f"first token, {miss['prefix_tokens']:,} of them cached", _seconds(answer["ttft"]["warm"])],
        [f"cost of missing those {miss['prefix_tokens']:,}", _seconds(miss["seconds"])],
        *([f"per token, {batch} at once", _seconds(seconds)] for batch, seconds in answer["tpot"].items()),
    ]
    if miss["worthwhile_bandwidth"]:
        rows.append(["loading it from a tier pays from", f"{miss['worthwhile_bandwidth'] / 1e9:.3g} GB/s"])
    table(out, f"times, {how}", ["", ""], rows)


def _charts(answer: dict[str, Any]) -> list[Chart]:
    fits, load, miss = answer["fits"], answer["load"], answer["miss"]
    layouts = {layout: [float(fit[layout]) for fit in fits] for layout in ("contiguous", "paged", "shared")}
    first = {
        f"{load['prompt']:,} new tokens": answer["ttft"]["cold"],
        f"{miss['prefix_tokens']:,} of them cached": answer["ttft"]["warm"],
    }
    later = {f"{batch} at once": seconds for batch, seconds in answer["tpot"].items()}
    return [
        Chart("sequences at once, by how keys and values are kept", [fit["codec"] for fit in fits], layouts),
        Chart("first token, ms", list(first), {"TTFT": [1e3 * value for value in first.values()]}, ",.4g"),
        Chart("time per token, ms", list(later), {"TPOT": [1e3 * value for value in later.values()]}, ",.4g"),
    ]


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
