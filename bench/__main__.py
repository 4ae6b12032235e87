"""``python -m bench``: the benchmarks that need neither a peer nor a model, one after another.

``python -m bench peers`` installs other servers, ``python -m bench serving`` measures pagetrie against them.
"""

from __future__ import annotations

import sys

USAGE = """usage: python -m bench [COMMAND] [--help]

  (none)       bookkeeping, scheduler, then waste
  bookkeeping  what the cache manager costs per request
  scheduler    what a step costs besides the model
  waste        KV memory that holds no token, paged and contiguous
  peers        install and list other servers to measure against
  serving      pagetrie and its peers, served and measured end to end
  live         what an open dashboard costs at 256 sequences
  floors       what decode and prefill must cost on this machine, and do cost
"""


def main(arguments: list[str]) -> int:
    # Imported as needed: only `serving` wants a model, and it takes a second to import.
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
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
