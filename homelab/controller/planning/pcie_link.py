"""The PCIe link between a card and its host: the bytes that it carries in a second. Pure."""

from __future__ import annotations

from homelab.controller.base.models import Value

# Of one lane in one direction, by the standard: generations 1 and 2 send 8 bits in 10, 3 to 5 send 128 in 130, and 6 sends 236 bytes in 256.
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
# Headers of packets and the driver take the rest. An H200 (generation 5, 16 lanes) took 0.85 to 0.88 of its link from pinned memory
# (`scripts/bench gpu --only streaming`). By common reports PCIe 3.0 with 16 lanes gives 12 to 13 of 15.75 GB/s, which is 0.76 to 0.83.
_PART = 0.8


class PcieLink(Value):
    """The generation that card and slot can have together, and the lanes that work now."""

    generation: int
    lanes: int

    @property
    def bytes_per_s(self) -> float:
        """What comes from pinned memory to the card."""
        return _PART * self.lanes * _LANE_BYTES_PER_S[self.generation]

    @property
    def text(self) -> str:
        """In words."""
        return f"PCIe {self.generation}.0, {self.lanes} {'lane' if self.lanes == 1 else 'lanes'}"
