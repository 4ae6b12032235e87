"""pagetrie: an LLM inference server around a paged, prefix-shared KV cache.

``from pagetrie import LLM, SamplingParams`` is the whole Python interface. Both names load on first use, so that
importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagetrie.engine.params import SamplingParams as SamplingParams
    from pagetrie.llm import LLM as LLM

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "pagetrie.llm", "SamplingParams": "pagetrie.engine.params"}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
