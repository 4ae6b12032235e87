"""Which running sequences lose their seats when others need them."""

from __future__ import annotations

from collections.abc import Iterable

from pagetrie.engine.sequence import Sequence

MAX_PREEMPTIONS = 3
"""Times a sequence may be preempted. The next time, it is *guaranteed*: see ``Scheduler``."""


def is_guaranteed(sequence: Sequence) -> bool:
    return sequence.preemptions >= MAX_PREEMPTIONS


def value(sequence: Sequence) -> tuple[bool, int, int, int, int]:
    """What losing its seat would cost: the least is preempted first.

    In this order: whether it is guaranteed, its priority, tokens it has computed since it was admitted (its progress
    that a preemption may lose), its age.
    """
    state, lease = sequence.state, sequence.lease
    progress = 0 if lease is None else lease.computed - lease.cached_tokens
    return is_guaranteed(sequence), -state.request.priority, progress, -state.order, -sequence.index


def choose_victims(gains: Iterable[tuple[Sequence, int]], pages: int, seats: int = 0) -> list[Sequence] | None:
    """The least valuable sequences that together bring ``pages`` and ``seats``; None if all of them wouldn't.

    From the least valuable on, as many as it takes; then those are spared, the most valuable first, without which it is
    still enough. So no victim is preempted in vain.

    Args:
        gains: the sequences that may be preempted, each with the pages that this would bring.
        pages, seats: what is needed; negative if there is some to spare.
    """
    chosen: list[tuple[Sequence, int]] = []
    for sequence, gain in sorted(gains, key=lambda pair: value(pair[0])):
        if pages <= 0 and seats <= 0:
            break
        chosen.append((sequence, gain))
        pages -= gain
        seats -= sequence.seats
    if pages > 0 or seats > 0:
        return None
    for pair in reversed(chosen.copy()):
        sequence, gain = pair
        if pages + gain <= 0 and seats + sequence.seats <= 0:
            chosen.remove(pair)
            pages += gain
            seats += sequence.seats
    return [sequence for sequence, _ in chosen]
