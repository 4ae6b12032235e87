"""``python -m bench``: the benchmarks of the cache, one after another; only that of the tiers needs the bundled model.

``python -m bench peers`` installs other servers, ``python -m bench serving`` measures pagetrie against them.
"""

from __future__ import annotations

import sys

USAGE = """usage: python -m bench [COMMAND] [--help]

  (none)       bookkeeping, scheduler, waste, then tiers
  bookkeeping  what the cache manager costs per request
  scheduler    what a step costs besides the model
  waste        KV memory that holds no token, paged and contiguous
  tiers        time to first token from each tier, read rates, what a neighbour notices of a load
  peers        install and list other servers to measure against
  serving      pagetrie and its peers, served and measured end to end
  live         what an open dashboard costs at 256 sequences
  floors       what decode and prefill must cost on this machine, and do cost
"""


def main(arguments: list[str]) -> int:
    # Imported as needed: what wants a model takes a second to import.
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command == "peers":
        from bench import peers

        return peers.main(rest)
    if command == "serving":
        from bench import serving

        return serving.main(rest)
    if command == "floors":
        from bench import floors

        return floors.main(rest)
    if command == "live":
        from bench import live

        sys.argv[1:] = rest
        live.main()
        return 0
    if command == "tiers":
        from bench import tiers

        return tiers.main(rest)
    if command not in ("", "bookkeeping", "scheduler", "waste"):
        print(USAGE, file=sys.stdout if command in ("-h", "--help", "help") else sys.stderr, end="")
        return 0 if command in ("-h", "--help", "help") else 2
    from bench import bookkeeping, scheduler, waste

    sys.argv[1:] = rest  # which they read themselves
    for name, module in (("bookkeeping", bookkeeping), ("scheduler", scheduler), ("waste", waste)):
        if command in ("", name):
            module.main()
        if not command:
            print()
    if not command:
        from bench import tiers

        return tiers.main(rest)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
