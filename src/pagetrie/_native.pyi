"""The native extension (``native/``): kernels over pages. Import torch first, so that both use one OpenMP runtime."""

def isa() -> str:
    """The instruction set in use: portable, avx2 or avx512."""

def best_isa() -> str:
    """The best instruction set that this machine has."""

def set_isa(name: str) -> None:
    """Choose the instruction set for the whole process ("auto" for the best); for tests.

    Raises:
        ValueError: no such instruction set, or this machine lacks it.
    """

def set_threads(threads: int) -> None:
    """Set the number of threads that kernels use, for the whole process; 0 for OpenMP's default.

    Raises:
        ValueError: fewer than 0.
    """

def threads() -> int:
    """The number of threads that kernels use."""
