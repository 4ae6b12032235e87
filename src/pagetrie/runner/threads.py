"""How many threads pay off."""

from __future__ import annotations

import os
from pathlib import Path


def physical_cores() -> int:
    """Physical cores that this process may use: two threads of one core share the units that matrix products fill."""
    try:
        cpus = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    siblings = set()
    for cpu in cpus:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings.add(topology.read_text(encoding="ascii").strip())
        except OSError:
            siblings.add(str(cpu))
    return max(1, len(siblings))
