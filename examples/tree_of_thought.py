"""Tree of thought on the game of 24 (Yao et al. 2023, arXiv:2305.10601), to show what branching costs.

The model proposes a step ("8 * 3"), a rule says which of the resulting states can still reach 24, the best go on. Every
state is a context: its branches are forks, so the instructions and the steps so far are computed and held once.

    python examples/tree_of_thought.py [NUMBERS ...]

A model as small as the bundled one guesses more than it reasons; the sharing is the same.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from pagetrie import LLM, SamplingParams
from pagetrie.llm import Context

GOAL = 24
INSTRUCTIONS = """The game of 24: combine the numbers with +, - and * until 24 is left. Each step takes two of the
numbers that are left and puts their result in their place.

Left: 4 6 1 1
Step: 4 * 6 = 24
Left: 24 1 1
Step: 24 * 1 = 24
Left: 24 1
Step: 24 * 1 = 24
Left: 24

Left: 2 9 10 12
Step: 12 * 2 = 24
Left: 24 9 10
Step: 10 - 9 = 1
Left: 24 1
Step: 24 * 1 = 24
Left: 24

Left: 5 5 5 9
Step: 5 + 5 = 10
Left: 10 5 9
Step: 10 + 5 = 15
Left: 15 9
Step: 15 + 9 = 24
Left: 24

"""
STEP = re.compile(r"\s*(\d+) ([-+*]) (\d+)")
Numbers = tuple[int, ...]


@dataclass
class State:
    """A node of the tree: the numbers left, the steps to it, and its context."""

    left: Numbers
    steps: list[str]
    context: Context


@dataclass
class Report:
    """What the search did. ``unshared_*`` is what the same branches would have taken each for itself."""

    solution: list[str] | None = None
    branches: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    most_pages: int = 0
    most_unshared_pages: int = 0


@cache
def reachable(left: Numbers) -> bool:
    """Whether 24 can still be made."""
    return left == (GOAL,) or any(reachable(after) for _, after in moves(left))


def moves(left: Numbers) -> Iterator[tuple[str, Numbers]]:
    """Every step from here and what it leaves, sorted."""
    for i, a in enumerate(left):
        for j, b in enumerate(left):
            if i != j:
                rest = [c for k, c in enumerate(left) if k not in (i, j)]
                for operator, result in (("+", a + b), ("-", a - b), ("*", a * b)):
                    if result >= 0:
                        yield f"{a} {operator} {b} = {result}", tuple(sorted([result, *rest]))


def search(
    llm: LLM, numbers: Sequence[int], *, branching: int = 4, breadth: int = 2, rounds: int = 12, seed: int = 0
) -> Report:
    """Breadth-first: from each state ``branching`` thoughts, of whose states ``breadth`` promising ones go on."""
    report = Report()
    start = tuple(sorted(numbers))
    root = llm.context(f"{INSTRUCTIONS}Left: {' '.join(map(str, start))}\nStep:")
    report.computed_tokens += len(root.token_ids)
    states = [State(start, [], root)]
    try:
        for number in range(rounds):
            if report.solution is None:
                states = _round(llm, states, report, branching, breadth, 1000 * seed + 100 * number)
    finally:
        for state in states:
            state.context.close()
    return report


def _round(llm: LLM, states: list[State], report: Report, branching: int, breadth: int, seed: int) -> list[State]:
    tree = [State(state.left, state.steps, fork) for state in states for fork in state.context.fork(branching)]
    params = [
        SamplingParams(temperature=0.9, max_tokens=12, stop=("=", "\n"), seed=seed + number)
        for number in range(len(tree))
    ]
    thoughts = llm.generate([""] * len(tree), params, contexts=[branch.context for branch in tree], progress=False)
    children = []
    for branch, thought in zip(tree, thoughts, strict=True):
        report.branches += 1
        report.prompt_tokens += len(thought.prompt_token_ids)
        report.computed_tokens += len(thought.prompt_token_ids) - thought.cached_tokens
        if (child := _take(branch, thought.text)) is not None:
            children.append(child)
    every = [*states, *tree]
    report.most_pages = max(report.most_pages, llm.cache_stats().pinned_pages)
    report.most_unshared_pages = max(report.most_unshared_pages, sum(state.context.pages for state in every))
    report.solution = next((child.steps for child in children if child.left == (GOAL,)), None)
    # Where no thought leads on, the states stay as they are, for another round with other seeds.
    kept = [child for child in children if reachable(child.left)][:breadth] or states
    contexts = [state.context for state in kept]
    for state in every:
        if state.context not in contexts:
            state.context.close()
    return kept


def _take(branch: State, thought: str) -> State | None:
    """The state after a thought, which becomes part of the branch's context; None if it's no legal step."""
    match = STEP.match(thought)
    proposed = f"{match[1]} {match[2]} {match[3]} = " if match else "?"
    for step, left in moves(branch.left):
        if step.startswith(proposed):
            branch.context.append(f" {step}\nLeft: {' '.join(map(str, left))}\nStep:")
            return State(left, [*branch.steps, step], branch.context)
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("numbers", nargs="*", type=int, default=[2, 3, 4, 5])
    parser.add_argument("--model", help="a GGUF file or a folder; the bundled model if left out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with LLM(options.model, num_pages=512) as llm:
        report = search(llm, options.numbers, seed=options.seed)
    print("found:", "; ".join(report.solution) if report.solution else "nothing this time; try another --seed")
    pages, unshared = report.most_pages, report.most_unshared_pages
    print(f"{report.branches} branches with {report.prompt_tokens} prompt tokens: {report.computed_tokens} computed")
    print(f"pages held at the widest: {pages}; {unshared} without sharing ({1 - pages / unshared:.0%} saved)")


if __name__ == "__main__":
    main()
