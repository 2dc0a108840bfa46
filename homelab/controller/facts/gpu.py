"""The cards of a node, as nvidia-smi, torch, the kernel log and ROCm's programs describe them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator

from homelab.controller.base.models import WireModel
from homelab.controller.facts.base import Pid, Run


def _torch_view(probe: dict[str, Any] | None) -> dict[str, Any] | None:
    devices = (probe or {}).get("devices") or []
    if not isinstance(devices, list) or not all(isinstance(device, dict) for device in devices):
        raise ValueError("devices is no list of objects")
    if not isinstance((probe or {}).get("arch_list") or [], list):
        raise ValueError("arch_list is no list")
    for device in devices:
        capability = device.get("capability") or []
        if not isinstance(capability, list | tuple) or not all(isinstance(number, int) for number in capability):
            raise ValueError("a capability is no pair of numbers")
    return probe


TorchView = Annotated[dict[str, Any] | None, AfterValidator(_torch_view)]


class GpuHolder(WireModel):
    """A process that holds memory of a card. `ours`: of the user we log in as, who may end it; `run`: of a run of this project."""

    pid: Pid = None
    program: str = ""
    memory_bytes: int | None = None
    user: str | None = None  # None where the process cannot be seen
    ours: bool = False
    run: Run | None = None
    type: str = ""  # "C" computes, "G" draws, "C+G"


class GpuFacts(WireModel):
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
    slowed_by: tuple[str, ...] = ()  # active reasons for lower clocks: "gpu_idle", "hw_thermal_slowdown", ...
    pcie_width: int | None = None  # lanes
    pcie_width_max: int | None = None
    shares_memory: bool | None = None  # it computes in the machine's memory; None where the node cannot tell
    mig: bool = False
    mig_bytes: tuple[int, ...] = ()  # memory of each MIG instance
    mig_free_bytes: tuple[int | None, ...] = ()  # of the same
    recovery_action: str | None = None  # what the driver asks for: "Reset", "Reboot", ...
    errors_now: int | None = None  # uncorrected memory errors since the driver was loaded
    errors_ever: int | None = None  # uncorrected memory errors of the card's life
    errors_mended: int = 0  # places taken out of use because of them
    repair_pending: bool = False
    repair_failed: bool = False
    holders: tuple[GpuHolder, ...] = ()
    nvlink: bool | None = None  # whether a bridge to another card is at work; None where it was not asked (one card)

    @property
    def free_bytes(self) -> int | None:
        """What a new process can have of the card; None where nvidia-smi does not tell."""
        if self.memory_free_bytes is not None or self.memory_total_bytes is None or self.memory_used_bytes is None:
            return self.memory_free_bytes
        return self.memory_total_bytes - self.memory_used_bytes - (self.memory_reserved_bytes or 0)


class AmdGpu(WireModel):
    """A card of AMD, which training does not use."""

    name: str
    memory_total_bytes: int | None = None


class Xid(WireModel):
    """An error report of the NVIDIA driver in the kernel log: number, how often, and how long ago the last was."""

    code: int
    bus_id: str  # "0000:01:00"
    count: int = 1
    last_s_ago: float | None = None
    program: str | None = None


class NvidiaOnBus(WireModel):
    """NVIDIA cards on the PCI bus, and which kernel driver has them ("nvidia", "nouveau", "vfio-pci")."""

    cards: int = 0
    driver: str | None = None


class NvidiaFacts(WireModel):
    """The NVIDIA cards with their driver, and what torch can do with them."""

    nvidia_smi: str = "missing"  # "ok", "missing", or the text of its error
    said: tuple[str, ...] = ()  # lines that it printed beside its answer
    driver_version: str | None = None
    driver_cuda: str | None = None
    cards: tuple[GpuFacts, ...] = ()
    left_out: tuple[GpuFacts, ...] = ()  # by the choice in cluster.toml (`homelab.controller.planning.machines.cards`), never by the node
    torch: TorchView = None  # torch's own view: arch list, matmul result per device; None on CPU nodes; "not_asked": by these runs in use
    on_bus: NvidiaOnBus | None = None  # read only where nvidia-smi shows no card
