"""What one rank will hold, item by item: an estimate by formulas or by a dry run, and how far it may be from the truth."""

from __future__ import annotations

from typing import Literal

from homelab.controller.base.models import Value
from homelab.controller.base.units import gigabytes
from homelab.controller.planning.pcie_link import PcieLink
from homelab.shared.law.streaming import WORDS


class MemoryItem(Value):
    """One line of an itemised estimate."""

    name: str
    size_bytes: int


class StreamingPlan(Value):
    """Layers of a rank that come from its host, see `homelab.shared.law.streaming`: each has `layer_bytes`, and so many bytes come in a second.
    That rate is the one of `link`. Without a link it is assumed: a disk, memory that is not pinned, or a card whose link is not known."""

    layers: int
    group: int
    host: Literal["memory", "pageable", "disk"]
    places: int
    layer_bytes: int
    bytes_per_s: float
    link: PcieLink | None = None

    @property
    def host_bytes(self) -> int:
        """What the host holds of the layers."""
        return self.layers * self.layer_bytes

    def step_s(self, compute_s: float, passes: int) -> float:
        """Seconds of a step of so many passes that computes for `compute_s`: layers come while others compute. The first one is waited for."""
        groups = -(-passes // self.group)
        return max(compute_s, 2 * groups * self.host_bytes / self.bytes_per_s) + self.layer_bytes / self.bytes_per_s

    @property
    def rate(self) -> str:
        """In words, with its source."""
        return f"{self.bytes_per_s / 1e9:.3g} GB/s ({'assumed' if self.link is None else f'by its link: {self.link.text}'})"

    @property
    def text(self) -> str:
        """In words."""
        layers = "1 layer is" if self.layers == 1 else f"{self.layers} layers are"
        return f"{layers} streamed from the host's {WORDS[self.host]}: {gigabytes(self.host_bytes)} GB, at {self.rate}"


class DryRun(Value):
    """A step of the real model without its weights, on `node`: the peak of what it holds, the operation there (torch's name), and
    what was estimated for the same by formulas. CUDA context, communicator, allocator and process are in neither."""

    node: str
    peak_bytes: int
    at: str
    analytic_bytes: int
    seconds: float


# How far an estimate may be below the truth: 32 of 37 published figures of programs that do as homelab does lie within 15 % (scripts/bench foresight),
# and a dry run of the real model within 3 % of what an H100 had allocated, before its fragments.
TIGHT, TIGHT_DRY_RUN = 0.15, 0.05


class MemoryEstimate(Value):
    """What one rank will hold at its peak. `available_bytes` is None where it is not known (offline, `[N/A]` cards).

    Where there is a dry run, the items are its own; `dry_run_scaled`: the formulas', corrected by the dry run of another rank.
    """

    items: tuple[MemoryItem, ...]
    available_bytes: int | None = None
    dry_run: DryRun | None = None
    dry_run_scaled: float | None = None

    @property
    def total_bytes(self) -> int:
        """Sum of the items."""
        return sum(item.size_bytes for item in self.items)

    @property
    def fits(self) -> bool | None:
        """None when the available memory is not known."""
        return None if self.available_bytes is None else self.total_bytes <= self.available_bytes

    @property
    def is_tight(self) -> bool:
        """Whether it fits by less than what such an estimate is wrong by."""
        return self.available_bytes is not None and (1 - self.margin) * self.available_bytes < self.total_bytes <= self.available_bytes

    @property
    def margin(self) -> float:
        """The part by which such an estimate may be too low."""
        return TIGHT if self.dry_run is None else TIGHT_DRY_RUN
