"""From a schedule to the runner's plan: which tokens to compute on which pages, and what to draw after them."""

from __future__ import annotations

from pagetrie.engine.beams import BeamGroup, GroupLease
from pagetrie.engine.runner import SampleSpec, SequenceStep, StepPlan
from pagetrie.engine.scheduler import Schedule
from pagetrie.engine.sequence import SEED_MASK, Sequence


def step_plan(plan: Schedule, copies: list[tuple[int, int]]) -> StepPlan:
    """What the runner is to do for a schedule, the pages' ``copies`` first."""
    steps: list[SequenceStep] = []
    for sequence, count in plan.shares.items():
        step, lease = sequence.decode_step, sequence.lease
        if step is not None and lease is not None and lease.computed + 1 == len(sequence.ids):
            step.token_ids, step.start, step.pages = sequence.ids[-1:], lease.computed, lease.pages
            steps.append(step)
        elif sequence.beams is None:
            steps.append(_sequence_step(sequence, count))
        else:
            steps += _beam_steps(sequence, sequence.beams, count)
    return StepPlan(copies, steps)


def _beam_steps(sequence: Sequence, group: BeamGroup, count: int) -> list[SequenceStep]:
    lease = sequence.lease
    if not isinstance(lease, GroupLease):
        return [_sequence_step(sequence, count)]
    start, end = lease.computed, lease.computed + count
    steps = []
    for beam, own in zip(group.search.live, lease.leases, strict=True):
        step = SequenceStep(token_ids=group.ids(beam, start, end), start=start, pages=own.pages)
        if end == len(sequence.ids):
            step.samples = [_sample_spec(sequence, 0)]
        steps.append(step)
    return steps


def _sequence_step(sequence: Sequence, count: int) -> SequenceStep:
    lease, state = sequence.lease, sequence.state
    assert lease is not None
    start = lease.computed
    end = start + count
    step = SequenceStep(token_ids=sequence.ids[start:end], start=start, pages=lease.pages)
    if end == len(sequence.ids) and state.max_tokens:
        if sequence.beams is None:
            step.samples = [_sample_spec(sequence, choice) for choice in range(sequence.seats)]
            if sequence.output_ids and len(sequence.output_ids) >= state.request.params.min_tokens:
                sequence.decode_step = step  # from now on nothing but these three fields changes
        elif not sequence.started:  # else the beams are known, and forked from here
            step.samples = [_sample_spec(sequence, 0)]
    if state.prompt_logprobs_due:
        step.prompt_targets = sequence.ids[start + 1 : end + 1]
        step.prompt_logprobs = state.request.params.prompt_logprobs or 0
    return step


def _sample_spec(sequence: Sequence, fork: int) -> SampleSpec:
    params = sequence.state.request.params
    banned: list[int] = []
    if len(sequence.output_ids) < params.min_tokens:
        banned = [*sequence.state.end_ids]
    return SampleSpec(
        params=params,
        seed=(sequence.seed + fork) & SEED_MASK,
        prompt_ids=sequence.state.request.prompt_ids,
        output_ids=sequence.output_ids,
        banned_ids=banned,
        candidates=sequence.beams.search.candidates if sequence.beams else 0,
    )
