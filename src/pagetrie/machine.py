"""What the machine has to give: cores and memory, as the process may use them (affinity and cgroup limits count)."""

from __future__ import annotations

import os
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def physical_cores(topology: Path = _TOPOLOGY, cgroup: Path = _CGROUP) -> int:
    """Physical cores this process may run on, at least 1.

    Hyper-threads of a core count once: they share the units that matrix products are bound by.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        siblings = _read(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list")
        cores.add(siblings or str(cpu))
    quota, _, period = (_read(cgroup / "cpu.max") or "max").partition(" ")
    if quota.isdigit() and period.isdigit():
        return max(1, min(len(cores), int(quota) // int(period)))
    return max(1, len(cores))


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Bytes that can still be taken without swapping, or None where the system doesn't tell."""
    free = None
    for line in (_read(meminfo) or "").splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            free = int(value.split()[0]) * 1024
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit and used and limit.isdigit() and used.isdigit():
        left = max(0, int(limit) - int(used))
        return left if free is None else min(free, left)
    return free


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
