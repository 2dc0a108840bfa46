"""What was measured, run after run, and what becomes of it: raw measurements, the table, the figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import report
from benchmarks.uneven.machines import CORES, Run, Window

_ORDER = ("auto", "equal", "rows", "hf_rebalance", "after_throttle", "eta", "plan")
_OTHERS_CORES = 0.3  # busy beside the nodes: the controller's looking and the kernel take less


class Ledger:
    """`raw` is every measurement of every round, round 0 being what came before the first."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.raw: list[dict[str, Any]] = []
        self.round = 0
        self._ratios: dict[str, list[float]] = {}
        self._speeds: dict[str, list[float]] = {}
        self._busy_cores: list[float] = []

    def keep(self, label: str, kind: str, run: Run, window: Window, **more: Any) -> None:
        """A window of a run on data of this kind. Call it while the run still trains, or the machine looks idle."""
        busy = run.busy_cores()
        line = {"round": self.round, "mode": label, "data": kind, **window.as_dict()}
        self.raw.append(line | {"start_s": run.start_s, "busy_cores": busy, **more})
        words = f"{label}, {kind.replace('_', ' ')}"
        if self.round:
            self._speeds.setdefault(words, []).append(window.tokens_per_s)
            self._busy_cores.append(busy)
        self.say(
            f"{words}: {window.tokens_per_s:.1f} tokens/s over {window.last - window.first} steps; {busy:.2f} cores busy"
        )

    def note(self, figure: str, value: float) -> None:
        """A value of this round for a figure."""
        self._ratios.setdefault(figure, []).append(value)
        self.say(f"  {figure} {value:.3f}")

    def figures(self) -> dict[str, float]:
        """Medians over the rounds."""
        names = sorted(self._ratios, key=lambda name: [name.startswith(start) for start in _ORDER].index(True))
        return {name: statistics.median(self._ratios[name]) for name in names}

    def table(self) -> list[tuple[str, str]]:
        """Rows for people: label, and median with lowest and highest."""
        rows = []
        for label, values in self._speeds.items():
            rows.append((f"{label}, tokens/s", report.spread(values)))
            if label.startswith("solo") and len(values) > 1:
                spread = 100 * (max(values) - min(values)) / statistics.median(values)
                rows.append(("  highest - lowest, % of the median", f"{spread:.1f}"))
        rows += [(f"{name}, rounds", report.spread(self._ratios[name])) for name in self.figures()]
        rows.append(("cores busy (1.10 for the nodes)", report.spread(self._busy_cores)))
        return rows

    def warning(self) -> str | None:
        """What to say when others computed on this machine at the same time; None when they hardly did."""
        beside = statistics.median(self._busy_cores) - sum(CORES.values())
        if beside <= _OTHERS_CORES:
            return None
        return f"warning: other programs kept {beside:.1f} cores busy meanwhile: these figures are not to be relied on"
