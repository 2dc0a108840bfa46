"""The cards of a node, as nvidia-smi describes them."""

from __future__ import annotations

from typing import Annotated, Optional

from homelab.shared.markers import AtLeast, AtMost, Longest
from homelab.shared.protocol.marks import OR_NONE, Pid, Run
from homelab.shared.protocol.message import Message

Generation = Annotated[Optional[Annotated[int, AtLeast(1), AtMost(6)]], OR_NONE]
Lanes = Annotated[Optional[Annotated[int, AtLeast(1), AtMost(32)]], OR_NONE]


class GpuHolder(Message):
    """A process that holds memory of a card. `ours`: of the user we log in as, who may end it; `run`: of a run of this project."""

    pid: Pid = None
    program: str = ""
    memory_bytes: int | None = None
    user: str | None = None  # None where the process cannot be seen
    ours: bool = False
    run: Run | None = None
    type: str = ""  # "C" computes, "G" draws, "C+G"


class GpuFacts(Message):
    """One card, from `nvidia-smi -q -x` (in polls: `--query-gpu`). What a card does not tell ("N/A") is None."""

    index: int
    name: str
    uuid: str | None = None
    bus_id: str | None = None  # "00000000:01:00.0"
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None  # by the driver; since 510 not part of `used`
    memory_free_bytes: int | None = None
    temperature_c: float | None = None
    utilization_percent: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    compute_capability: str | None = None
    compute_mode: str | None = None  # "Default" | "Exclusive_Process" | "Prohibited"
    slowed_by: Annotated[tuple[str, ...], Longest(1000)] = ()  # active reasons for lower clocks: "gpu_idle", "hw_thermal_slowdown", ...
    pcie_generation: Generation = None  # of PCIe: the lower of what the card and its slot can have
    pcie_width: Lanes = None  # now
    pcie_width_max: Lanes = None
    shares_memory: bool | None = None  # it computes in the machine's memory; None where the node cannot tell
    mig: bool = False
    mig_bytes: Annotated[tuple[int, ...], Longest(1000)] = ()  # memory of each MIG instance
    mig_free_bytes: Annotated[tuple[int | None, ...], Longest(1000)] = ()  # of the same
    recovery_action: str | None = None  # what the driver asks for: "Reset", "Reboot", ...
    errors_now: int | None = None  # uncorrected memory errors since the driver was loaded
    errors_ever: int | None = None  # uncorrected memory errors of the card's life
    errors_mended: int = 0  # places taken out of use because of them
    repair_pending: bool = False
    repair_failed: bool = False
    holders: Annotated[tuple[GpuHolder, ...], Longest(10_000)] = ()
    nvlink: bool | None = None  # whether a bridge to another card is at work; None where it was not asked (one card)

    @property
    def free_bytes(self) -> int | None:
        """What a new process can have of the card; None where nvidia-smi does not tell."""
        if self.memory_free_bytes is not None or self.memory_total_bytes is None or self.memory_used_bytes is None:
            return self.memory_free_bytes
        return self.memory_total_bytes - self.memory_used_bytes - (self.memory_reserved_bytes or 0)
