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


OF_A_STEP = ("train", "eval", "save", "shares")
ONCE_A_STEP = ("train", "eval")


class KnownKeys:
    """The keys of very many lines, in little room: those of a rank and an attempt are spans of steps."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self._steps: dict[Key, StepSet] = defaultdict(StepSet)
        self._counts: Counter[tuple[int | None, int | None]] = Counter()
        self.places: dict[Key, StepSet] = defaultdict(StepSet)
        """Kind and rank -> the steps of all attempts."""
        self.of_attempt: dict[Key, dict[int, StepSet]] = defaultdict(lambda: defaultdict(StepSet))
        """Kind and rank -> attempt -> its steps."""
        self.repeated: dict[Key, StepSet] = defaultdict(StepSet)
        """Kind and rank -> the steps that two attempts have."""
        self.last_steps: dict[int, int] = {}
        """Attempt -> the newest of its steps."""
        self.trained: set[int] = set()
        """The attempts that have done a step."""
        for line in lines:
            self.add(line)

    def __contains__(self, line: Mapping[str, Any]) -> bool:
        group, step = group_of(line)
        return group in self._steps and step in self._steps[group]

    def add(self, line: Mapping[str, Any]) -> bool:
        """Whether it was not known."""
        group, step = group_of(line)
        if not self._steps[group].add(step):
            return False
        kind, attempt, rank, _ = group
        self._counts[attempt, rank] += bool(kind)
        if kind == "train" and attempt is not None:
            self.trained.add(attempt)
        number = attempt or 0
        if kind in OF_A_STEP:
            self.last_steps[number] = max(self.last_steps.get(number, 0), step)
        if kind in ONCE_A_STEP:
            of_attempt = self.of_attempt[kind, rank]
            if not self.places[kind, rank].add(step) and any(step in steps for other, steps in of_attempt.items() if other != number):
                self.repeated[kind, rank].add(step)
            of_attempt[number].add(step)
        return True

    def has_steps(self, kind: str, rank: int, first: int, last: int) -> bool:
        """Whether lines of this kind of all these steps are known, of any attempt."""
        return (kind, rank) in self.places and self.places[kind, rank].covers(first, last)

    def counts(self, attempt: int) -> dict[int, int]:
        """Rank -> how many lines of this attempt are known."""
        return {rank or 0: count for (of, rank), count in self._counts.items() if of == attempt}


def group_of(line: Mapping[str, Any]) -> tuple[tuple[Any, ...], int]:
    """Kind, attempt, rank and message of a line; its step, -1 where it has none."""
    step = line.get("step")
    return (line.get("kind"), line.get("attempt"), line.get("rank"), line.get("message")), -1 if step is None else step
