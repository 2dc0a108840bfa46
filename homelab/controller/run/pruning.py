"""Which runs a person may want to remove. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from homelab.controller.run.state import FINISHED


@dataclass(frozen=True)
class PrunableRun:
    """A run and where it lies. `bytes_on`: place -> bytes. `busy`: who is at work on it, `unasked`: its nodes that did not answer,
    `result_on`: the node that has its result, in the folder `result`, where that was not fetched; each empty where there is nothing of the kind.
    `step`: of the newest checkpoint on the nodes."""

    name: str
    state: str
    bytes_on: Mapping[str, int] = field(default_factory=dict)
    busy: str = ""
    unasked: Sequence[str] = ()
    result_on: str = ""
    result: str = "final"
    step: int = 0

    @property
    def only(self) -> str:
        """What of it lies nowhere else, "" for nothing."""
        if not self.result_on:
            return ""
        return f"{'its trained model is' if self.result == 'final' else 'what its program has saved is'} only on {self.result_on}"


def choose(candidates: Sequence[PrunableRun], named: Collection[str], keep: int) -> tuple[list[PrunableRun], dict[str, str]]:
    """(the runs that go, why each other one stays). `candidates`: the newest first; without names the newest `keep` stay.

    A run that goes on never goes, and one whose result is nowhere else goes only when it is named.
    """
    going: list[PrunableRun] = []
    staying: dict[str, str] = {}
    for number, run in enumerate(candidates):
        if named and run.name not in named:
            continue
        why = _why_not(run) or ("" if named else _why_unnamed(run, number < keep))
        if why:
            staying[run.name] = why
        else:
            going.append(run)
    return going, staying


def _why_not(run: PrunableRun) -> str:
    if run.busy:
        return run.busy
    if run.unasked:
        return f"{', '.join(run.unasked)} could not be asked, and the run may be active there"
    # Lost, and all that may have it have answered, or are in the cluster no more.
    return "" if run.state in FINISHED or run.state == "lost" else f"it is {run.state or 'in an unknown state'}"


def _why_unnamed(run: PrunableRun, is_newest: bool) -> str:
    return "it is the newest" if is_newest else run.only
