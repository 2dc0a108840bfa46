"""What the ranks of a run have measured, as far as a dashboard shows it. Its lines are taken one by one, and none is kept for long. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from homelab.controller.dashboard.attempt_pace import AttemptPace
from homelab.controller.dashboard.step_curve import StepCurve
from homelab.shared.protocol.rank_messages import Metric

_MOST_SAVES = 100  # steps of which it is known when they were saved: the newest
_MOST_PACES = 4  # attempts whose pace is known: the newest


class Measured:
    """The figures of any number of lines, in whatever order these come. `lines`: each once."""

    def __init__(self, lines: Iterable[Metric] = ()) -> None:
        self.restart()
        for line in lines:
            self.add(line)

    def restart(self) -> None:
        """Forget all."""
        self.losses = StepCurve()
        """Of the newest attempt that made each step. All ranks write the same global loss."""
        self.eval_losses = StepCurve()
        """The loss on the held-out rows."""
        self._accuracies: dict[str, tuple[int, int, float]] = {}  # kind of line -> attempt, step, value of the newest
        self.moves: list[Metric] = []
        """What says that rows moved between ranks, by attempt, step and time."""
        self._paces: dict[int, AttemptPace] = defaultdict(AttemptPace)
        self._firsts: list[tuple[int, int]] = []  # of each attempt that made a step: its number and its first step, by number
        self._notes: dict[str, tuple[int, int, float]] = {}
        self._saves: dict[int, dict[int, tuple[int, float]]] = {}

    def take(self, _: Mapping[str, Any], metric: Metric) -> None:
        """`add`, for `homelab.controller.run.metrics`."""
        self.add(metric)

    def add(self, line: Metric) -> None:
        """One line."""
        place = (line.attempt, line.step, line.time)
        accuracy = line.accuracy if line.kind == "train" else line.eval_accuracy
        if accuracy is not None:
            self._accuracies[line.kind] = max((line.attempt, line.step, accuracy), self._accuracies.get(line.kind, (0, 0, 0.0)))
        if line.kind == "train":
            self._train(line)
        elif line.kind == "eval" and line.eval_loss is not None:
            self.eval_losses.put(line.step, line.eval_loss, line.attempt, line.time)
        elif line.kind == "note" and line.message:
            self._notes[line.message] = min(place, self._notes.get(line.message, place))
        elif line.kind == "shares":
            insort(self.moves, line, key=lambda entry: (entry.attempt, entry.step, entry.time))
            pace = self._paces[line.attempt]
            pace.moved = max(pace.moved, line.step)
        elif line.kind == "save":
            ranks = self._saves.setdefault(line.step, {})
            ranks[line.rank] = max((line.attempt, line.time), ranks.get(line.rank, (0, 0.0)))
            if len(self._saves) > _MOST_SAVES:
                del self._saves[min(self._saves)]

    def accuracy(self, kind: str) -> float | None:
        """The part of the pairs or answers that the model judged rightly in the newest line of this kind; None where tokens are learned."""
        return self._accuracies[kind][2] if kind in self._accuracies else None

    def pace(self, attempt: int) -> AttemptPace:
        """How fast this attempt is; an empty one where it has made no step."""
        return self._paces.get(attempt) or AttemptPace()

    @property
    def notes(self) -> list[str]:
        """What ranks have noted, each once."""
        return sorted(self._notes, key=self._notes.__getitem__)

    def saved(self, step: int) -> dict[int, float]:
        """Rank -> when it saved this step."""
        return {rank: moment for rank, (_, moment) in self._saves.get(step, {}).items()}

    def eta_s(self, step: int, total: int | None, step_tokens: float | None = None) -> float | None:
        """Seconds from `step` to the end, at the pace of the newest attempt; None while no step is done, or where the end is not known."""
        seconds_per_step = self.pace(self._firsts[-1][0]).seconds_per_step(step_tokens) if self._firsts else None
        return None if total is None or seconds_per_step is None else max(0, total - step) * seconds_per_step

    def _train(self, line: Metric) -> None:
        self._paces[line.attempt].add(line)
        if len(self._paces) > _MOST_PACES:
            del self._paces[min(self._paces)]
        place = bisect_left(self._firsts, (line.attempt,))
        is_known = place < len(self._firsts) and self._firsts[place][0] == line.attempt
        if not is_known or line.step < self._firsts[place][1]:
            # Steps that an earlier attempt had reached beyond the first one of a later attempt were undone.
            self._firsts[place : place + is_known] = [(line.attempt, line.step)]
            self.losses.cut(line.step, line.attempt)
        if line.loss is not None and all(first > line.step for _, first in self._firsts[place + 1 :]):
            self.losses.put(line.step, line.loss, line.attempt, line.time)
