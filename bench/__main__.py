"""``python -m bench``: the benchmarks that need neither a peer nor a model, one after another."""

from __future__ import annotations

from bench import bookkeeping, waste


def main() -> None:
    bookkeeping.main()
    print()
    waste.main()


if __name__ == "__main__":
    main()
