"""What one rank will hold, item by item: an estimate by formulas or by a dry run, and how far it may be from the truth."""

from __future__ import annotations

from homelab.controller.base.models import Value


class MemoryItem(Value):
    """One line of an itemised estimate."""

    name: str
    size_bytes: int


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
