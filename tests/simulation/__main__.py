"""Command line: replay one world, or soak in many."""

from __future__ import annotations

import argparse
import sys

from tests.simulation.attack import Failure, only, play, soak
from tests.simulation.spec import draw_world


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="play this world only")
    parser.add_argument("--only", help="with --seed: the requests to keep, as r0,r3,...")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=2000, help="how many worlds")
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    arguments = parser.parse_args()
    if arguments.seed is None:
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        _, failures = soak(seeds, arguments.steps)
        return 1 if failures else 0
    spec = draw_world(arguments.seed)
    if arguments.only:
        spec = only(spec, arguments.only.split(","))
    error = play(spec)
    names = tuple(request.name for request in spec.requests)
    print("nothing wrong" if error is None else Failure(spec, names, error))
    return 0 if error is None else 1


if __name__ == "__main__":
    sys.exit(main())
