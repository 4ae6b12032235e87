"""What a request gives when it is alone: computed from the prefix directly, with no engine and no cache.

Written for plainness: everything is recomputed from the whole text at every token.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagetrie.engine.beam_search import BeamSearch
from pagetrie.engine.params import SamplingParams
from pagetrie.engine.runner import SampleSpec, TokenLogprob
from pagetrie.sim.memory import extend_prefix
from tests.simulation.vocabulary import AwkwardVocabulary

_VOCABULARY = AwkwardVocabulary()

Choose = Callable[[int, SampleSpec], TokenLogprob]


@dataclass(slots=True)
class Alone:
    """One choice of a request, run alone.

    Attributes:
        tokens: with their log-probabilities.
        shown: the text that may be shown after each token, at least one entry more than tokens; the last is final.
        reason, stop_reason: how it ends.
    """

    tokens: list[TokenLogprob] = field(default_factory=list)
    shown: list[str] = field(default_factory=lambda: [""])
    reason: str = "length"
    stop_reason: str | int | None = None
    final: str = ""


def prefix_of(root: int, tokens: Sequence[int]) -> int:
    for token in tokens:
        root = extend_prefix(root, token)
    return root


def run_alone(
    choose: Choose, root: int, prompt: Sequence[int], params: SamplingParams, seed: int, max_tokens: int
) -> Alone:
    """One choice: ``max_tokens`` already has the limits of context and pool in it; ``seed`` is the choice's own."""
    alone, output = Alone(), list[int]()
    prefix = prefix_of(root, prompt)
    while len(output) < max_tokens:
        banned: list[int] = []
        if len(output) < params.min_tokens:
            banned = [*params.stop_token_ids] + ([] if params.ignore_eos else [*_VOCABULARY.eos_ids])
        token = choose(prefix, SampleSpec(params, seed, prompt, output, banned))
        if token.token_id in params.stop_token_ids:
            alone.reason, alone.stop_reason = "stop", token.token_id
            break
        if token.token_id in _VOCABULARY.eos_ids and not params.ignore_eos:
            alone.reason = "stop"
            break
        output.append(token.token_id)
        alone.tokens.append(token)
        prefix = extend_prefix(prefix, token.token_id)
        text, stop = _cut(params, output, final=False)
        alone.shown.append(text)
        if stop is not None:
            alone.reason, alone.stop_reason = "stop", stop
            break
    alone.final, stop = _cut(params, output, final=True)
    if stop is not None:
        alone.reason, alone.stop_reason = "stop", stop
    return alone


def run_beams_alone(
    choose: Choose, root: int, prompt: Sequence[int], params: SamplingParams, max_tokens: int
) -> list[Alone]:
    """The choices of a beam search: the search is the engine's own, but its beams are prefixes, with no page."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else _VOCABULARY.eos_ids)}
    search = BeamSearch(
        width=params.beam_width,
        max_tokens=max_tokens,
        end_ids=ends,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        top_logprobs=params.logprobs or 0,
    )
    prefixes = [prefix_of(root, prompt)]
    while not search.done:
        spec = SampleSpec(params, 0, prompt, search.live[0].tokens, candidates=search.candidates)
        parents = search.advance([choose(prefix, spec).top for prefix in prefixes])
        prefixes = [
            extend_prefix(prefixes[parent], beam.tokens[-1]) for parent, beam in zip(parents, search.live, strict=True)
        ]
    return [
        Alone(
            tokens=beam.logprobs,
            reason="length" if beam.end is None else "stop",
            stop_reason=beam.end if beam.end in params.stop_token_ids else None,
            final=_decode(params, beam.tokens, final=True),
        )
        for beam in search.best(params.n)
    ]


def _cut(params: SamplingParams, output: Sequence[int], *, final: bool) -> tuple[str, str | None]:
    """The text to show after ``output``, and the stop string that ends it."""
    text = _decode(params, output, final=final)
    if not final and len(output) < params.min_tokens:
        return text, None
    # Stop strings count only in what comes after the tokens that had to be there.
    start = len(_decode(params, output[: max(0, params.min_tokens - 1)], final=False))
    found = min(((at, stop) for stop in params.stop if (at := text.find(stop, start)) >= 0), default=None)
    if found is not None:
        at = found[0]
        return text[:at], next(stop for stop in params.stop if text.startswith(stop, at))
    if final:
        return text, None
    held = max(
        (
            length
            for stop in params.stop
            for length in range(1, min(len(stop), len(text) - start + 1))
            if text.endswith(stop[:length])
        ),
        default=0,
    )
    return text[: len(text) - held], None


def _decode(params: SamplingParams, output: Sequence[int], *, final: bool) -> str:
    hidden = _VOCABULARY.special_ids if params.skip_special_tokens else ()
    joined = b"".join(_VOCABULARY.token_bytes(token) for token in output if token not in hidden)
    return utf_8_decode(joined, "replace", final)[0]
