"""The cards of a node, as nvidia-smi, torch, the kernel log and ROCm's programs describe them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator

from homelab.controller.base.models import WireModel
from homelab.controller.facts.reading import AsMessage
from homelab.shared.protocol.card_messages import GpuFacts


def _torch_view(probe: dict[str, Any] | None) -> dict[str, Any] | None:
    devices = (probe or {}).get("devices") or []
    if not isinstance(devices, list) or not all(isinstance(device, dict) for device in devices):
        raise ValueError("devices is not a list of objects")
    if not isinstance((probe or {}).get("arch_list") or [], list):
        raise ValueError("arch_list is not a list")
    for device in devices:
        capability = device.get("capability") or []
        if not isinstance(capability, list | tuple) or not all(isinstance(number, int) for number in capability):
            raise ValueError("a capability is not a pair of numbers")
    return probe


TorchView = Annotated[dict[str, Any] | None, AfterValidator(_torch_view)]


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


Cards = tuple[Annotated[GpuFacts, AsMessage], ...]


class NvidiaFacts(WireModel):
    """The NVIDIA cards with their driver, and what torch can do with them."""

    nvidia_smi: str = "missing"  # "ok", "missing", or the text of its error
    program: str = ""  # its path, where PATH does not lead to it (WSL2, NixOS)
    said: tuple[str, ...] = ()  # lines that it printed beside its answer
    driver_version: str | None = None
    driver_cuda: str | None = None
    cards: Cards = ()
    left_out: Cards = ()  # by the choice in cluster.toml (`homelab.controller.planning.machines.cards`), never by the node
    torch: TorchView = None  # torch's own view: arch list, matmul result per device; None on CPU nodes; "not_asked": by these runs in use
    on_bus: NvidiaOnBus | None = None  # read only where nvidia-smi shows no card

    @property
    def are_on_bus(self) -> bool:
        """Whether the machine sees cards of NVIDIA that its driver does not show."""
        return self.on_bus is not None and self.on_bus.cards > 0
