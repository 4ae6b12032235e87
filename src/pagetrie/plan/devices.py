"""What common accelerators offer, by their makers' data sheets: dense 16-bit arithmetic, no sparsity."""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9


@dataclass(frozen=True, slots=True)
class Device:
    """Where a model runs.

    Attributes:
        memory: bytes for weights and cache.
        bandwidth: bytes per second between memory and arithmetic.
        flops: 16-bit multiply-add operations per second, counted as two.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float

    def times(self, count: int) -> Device:
        """``count`` of them as one, as if their links cost nothing."""
        if count == 1:
            return self
        return Device(f"{count} x {self.name}", count * self.memory, count * self.bandwidth, count * self.flops)


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("t4", 16 * GB, 320 * GB, 65e12),
        Device("l4", 24 * GB, 300 * GB, 121e12),
        Device("a10g", 24 * GB, 600 * GB, 70e12),
        Device("rtx-3090", 24 * GB, 936 * GB, 71e12),
        Device("rtx-4090", 24 * GB, 1008 * GB, 165e12),
        Device("l40s", 48 * GB, 864 * GB, 362e12),
        Device("a100-40gb", 40 * GB, 1555 * GB, 312e12),
        Device("a100-80gb", 80 * GB, 2039 * GB, 312e12),
        Device("h100-80gb", 80 * GB, 3350 * GB, 989e12),
        Device("h200", 141 * GB, 4800 * GB, 989e12),
        Device("b200", 180 * GB, 8000 * GB, 2250e12),
        Device("mi300x", 192 * GB, 5300 * GB, 1307e12),
    )
}
