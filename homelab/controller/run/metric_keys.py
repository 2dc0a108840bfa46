"""Which lines of metrics.jsonl are one, and which a resumed attempt has undone. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from homelab.controller.run.step_set import StepSet

Line = dict[str, Any]


Key = tuple[Any, ...]


def key(line: Mapping[str, Any]) -> Key:
    """What makes a line this one and no other."""
    return tuple(line.get(name) for name in ("kind", "attempt", "rank", "step", "message"))


_OF_A_STEP = ("train", "eval", "save", "shares")
_ONCE_A_STEP = ("train", "eval")


class KnownKeys:
    """The keys of very many lines, in little room: those of a rank and an attempt are spans of steps.

    A line is undone where a later attempt went on before its step, or has a line of the same rank and step. `resumed`: attempt -> the step
    after which it went on. An attempt that has done no step has replaced nothing yet.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self._steps: dict[Key, StepSet] = defaultdict(StepSet)
        self._places: dict[Key, StepSet] = defaultdict(StepSet)  # kind and rank -> the steps of all attempts
        self._of_attempt: dict[Key, dict[int, StepSet]] = defaultdict(lambda: defaultdict(StepSet))  # the same, of each attempt
        self._last_steps: dict[int, int] = {}  # attempt -> the newest of its steps
        self._trained: set[int] = set()
        self._counts: Counter[tuple[int | None, int | None]] = Counter()
        self._has_repeated = False  # two attempts have the same step
        for line in lines:
            self.add(line)

    def __contains__(self, line: Mapping[str, Any]) -> bool:
        group, step = _group(line)
        return group in self._steps and step in self._steps[group]

    def add(self, line: Mapping[str, Any]) -> bool:
        """Whether it was not known."""
        group, step = _group(line)
        if not self._steps[group].add(step):
            return False
        kind, attempt, rank, _ = group
        self._counts[attempt, rank] += bool(kind)
        if kind == "train" and attempt is not None:
            self._trained.add(attempt)
        number = attempt or 0
        if kind in _OF_A_STEP:
            self._last_steps[number] = max(self._last_steps.get(number, 0), step)
        if kind in _ONCE_A_STEP:
            of_attempt = self._of_attempt[kind, rank]
            if not self._places[kind, rank].add(step):
                self._has_repeated = self._has_repeated or any(step in steps for other, steps in of_attempt.items() if other != number)
            of_attempt[number].add(step)
        return True

    def has_steps(self, kind: str, rank: int, first: int, last: int) -> bool:
        """Whether lines of this kind of all these steps are known, of any attempt."""
        return (kind, rank) in self._places and self._places[kind, rank].covers(first, last)

    def counts(self, attempt: int) -> dict[int, int]:
        """Rank -> how many lines of this attempt are known."""
        return {rank or 0: count for (of, rank), count in self._counts.items() if of == attempt}

    def are_undone(self, resumed: Mapping[int, int], newer: KnownKeys) -> bool:
        """Whether any of them is undone, where `newer` are known, too."""
        trained = self._trained | newer._trained
        if self._has_repeated or any(_is_behind(attempt, last, resumed, trained) for attempt, last in self._last_steps.items()):
            return True
        return any(
            steps.meets(others)
            for place, of_attempt in newer._of_attempt.items()
            for attempt, steps in of_attempt.items()
            for earlier, others in self._of_attempt.get(place, {}).items()
            if earlier < attempt
        )

    def is_undone(self, line: Mapping[str, Any], resumed: Mapping[int, int], newer: KnownKeys) -> bool:
        """Whether this line is undone, one of them or of `newer`."""
        (kind, attempt, rank, _), step = _group(line)
        number = attempt or 0
        if kind in _OF_A_STEP and _is_behind(number, step, resumed, self._trained | newer._trained):
            return True
        later = (steps for keys in (self, newer) for other, steps in keys._of_attempt.get((kind, rank), {}).items() if other > number)
        return kind in _ONCE_A_STEP and any(step in steps for steps in later)


def _is_behind(attempt: int, step: int, resumed: Mapping[int, int], trained: Iterable[int]) -> bool:
    return any(later > attempt and later in resumed and step > resumed[later] for later in trained)


def _group(line: Mapping[str, Any]) -> tuple[tuple[Any, ...], int]:
    step = line.get("step")
    return (line.get("kind"), line.get("attempt"), line.get("rank"), line.get("message")), -1 if step is None else step
