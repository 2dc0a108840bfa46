"""What was measured, run after run, and what becomes of it: raw measurements, the table, the figures. Disturbed rounds do not count."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import report
from benchmarks.uneven.machines import Run, Window
from benchmarks.uneven.validity import Account, disturbance

_ORDER = ("auto", "equal", "rows", "hf_rebalance", "after_throttle", "eta", "plan")


class Disturbed(Exception):
    """This round was measured on other machines than it says. What it says: why."""


class Ledger:
    """`raw` is every measurement of every round, round 0 being what came before the first; also of the rounds that were discarded,
    where "disturbed" says why.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.raw: list[dict[str, Any]] = []
        self.round = 0
        self._ratios: dict[str, list[float]] = {}
        self._speeds: dict[str, list[float]] = {}
        self._busy_cores: list[float] = []
        self._begun = self._counted()

    def begin(self, number: int) -> None:
        """A round, from the start; what was measured since the last round was ended counts no more."""
        self.round = number
        self._ratios, self._speeds, self._busy_cores = copy.deepcopy(self._begun)

    def end(self) -> None:
        """The round is whole: it counts."""
        self._begun = copy.deepcopy(self._counted())

    def _counted(self) -> tuple[dict[str, list[float]], dict[str, list[float]], list[float]]:
        return self._ratios, self._speeds, self._busy_cores

    def keep(self, label: str, kind: str, run: Run, window: Window, account: Account, *, computing: bool = False, **more: Any) -> None:
        """A window of a run on data of this kind. `account`: what was computed since the run has trained; see `disturbance`.

        Raises Disturbed when that was not what the nodes' limits say.
        """
        why = disturbance(account, computing=computing)
        nodes = {node: round(used / account.seconds, 3) for node, (used, _) in account.nodes.items()}
        line = {"round": self.round, "mode": label, "data": kind, **window.as_dict()}
        line |= {"start_s": run.start_s, "busy_cores": round(account.busy_cores, 3), "others_cores": round(account.others_cores, 3)}
        self.raw.append(line | {"node_cores": nodes, "disturbed": why, **more})
        words = f"{label}, {kind.replace('_', ' ')}"
        self.say(
            f"{words}: {window.tokens_per_s:.1f} tokens/s over {window.last - window.first} steps; {account.busy_cores:.2f} cores busy, "
            f"{account.others_cores:.2f} of them with others' work"
        )
        if why:
            raise Disturbed(f"{words}: {why}")
        if self.round:
            self._speeds.setdefault(words, []).append(window.tokens_per_s)
            if label == "auto" and window.ceiling is not None:
                self.note(f"auto_ceiling_{kind}", window.ceiling)
            self._busy_cores.append(account.busy_cores)

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
        if self._busy_cores:
            rows.append(("cores busy (1.10 for the nodes)", report.spread(self._busy_cores)))
        return rows
