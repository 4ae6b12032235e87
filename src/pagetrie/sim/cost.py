"""What a step costs."""

from __future__ import annotations

from dataclasses import dataclass

from pagetrie.engine.runner import StepPlan


def work_of(plan: StepPlan) -> tuple[int, int]:
    """Tokens to compute, and pairs of such a token and a position that it attends to, itself included."""
    tokens = attended = 0
    for share in plan.sequences:
        count = len(share.token_ids)
        tokens += count
        attended += count * share.start + count * (count + 1) // 2
    return tokens, attended


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds per step as a sum of four parts, each linear in what the plan asks for.

    Attributes:
        per_step: for any step (reading the weights, fixed work).
        per_token: for each token computed (matrix products).
        per_attended: for each pair of a computed token and a position that it attends to, itself included.
        per_copy: for each page copied.
    """

    per_step: float
    per_token: float
    per_attended: float = 0.0
    per_copy: float = 0.0

    def seconds(self, plan: StepPlan) -> float:
        """What ``plan`` takes."""
        tokens, attended = work_of(plan)
        return self.per_step + self.per_token * tokens + self.per_attended * attended + self.per_copy * len(plan.copies)
