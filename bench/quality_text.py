"""The text that quality is measured on: the Python reference, as ``pydoc_data.topics`` holds it.

It comes with Python, so everyone has it: technical English, some code.
"""

from __future__ import annotations

import pydoc_data.topics

from pagetrie.models.checkpoint import Checkpoint


def text_windows(checkpoint: Checkpoint, windows: int, tokens: int) -> list[list[int]]:
    """Token ids of windows, evenly spread over the text.

    Raises:
        ValueError: the text is too short for so many.
    """
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = checkpoint.tokenizer().encode(text)
    if windows * tokens > len(ids):
        raise ValueError(f"{windows} windows of {tokens} tokens don't fit in the text's {len(ids)}")
    starts = [i * (len(ids) - tokens) // max(1, windows - 1) for i in range(windows)]
    return [list(ids[start : start + tokens]) for start in starts]
