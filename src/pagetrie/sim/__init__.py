"""The simulator: the real scheduler and cache manager over a runner that costs time instead of computing.

It sees ``engine`` and ``kv`` only. Time is a ``VirtualClock``, which the runner moves by what a step would cost.
"""

from pagetrie.sim.clock import VirtualClock
from pagetrie.sim.cost import StepCost
from pagetrie.sim.memory import PageContentError, PageMemory, extend_prefix
from pagetrie.sim.runner import SimRunner, draw
from pagetrie.sim.threads import VirtualThreads
from pagetrie.sim.tiers import SimTierOptions, sim_transfers

__all__ = [
    "PageContentError",
    "PageMemory",
    "SimRunner",
    "SimTierOptions",
    "StepCost",
    "VirtualClock",
    "VirtualThreads",
    "draw",
    "extend_prefix",
    "sim_transfers",
]
