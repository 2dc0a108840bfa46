"""Which lines of metrics.jsonl a later attempt has undone. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from homelab.controller.run.metric_keys import OF_A_STEP, ONCE_A_STEP, Key, KnownKeys, group_of


class Undone:
    """A line is undone where a later attempt went on before its step, or has a line of the same rank and step. `resumed`: attempt -> the step
    after which it went on. An attempt that has done no step has replaced nothing yet.

    Of lines that are `known`, and of `newer` ones. Many attempts cost no more than few: a run of months has thousands, and millions of lines.
    """

    def __init__(self, resumed: Mapping[int, int], known: KnownKeys, newer: KnownKeys | None = None) -> None:
        self._known, self._newer = known, newer or KnownKeys()
        went_on = sorted((attempt, resumed[attempt]) for attempt in known.trained | self._newer.trained if attempt in resumed)
        self._attempts = [attempt for attempt, _ in went_on]
        self._lowest: list[int] = []  # the first step from which this attempt or a later one went on
        for _, step in reversed(went_on):
            self._lowest.append(min(step, self._lowest[-1]) if self._lowest else step)
        self._lowest.reverse()

    def __contains__(self, line: Mapping[str, Any]) -> bool:
        (kind, attempt, rank, _), step = group_of(line)
        number = attempt or 0
        if kind in OF_A_STEP and self._is_behind(number, step):
            return True
        return kind in ONCE_A_STEP and self._has_later((kind, rank), number, step)

    @property
    def has_known(self) -> bool:
        """Whether any line that is known is undone."""
        if self._known.repeated or any(self._is_behind(attempt, last) for attempt, last in self._known.last_steps.items()):
            return True
        return any(
            steps.meets(others)
            for place, of_attempt in self._newer.of_attempt.items()
            for attempt, steps in of_attempt.items()
            if place in self._known.places and steps.meets(self._known.places[place])
            for earlier, others in self._known.of_attempt[place].items()
            if earlier < attempt
        )

    def _is_behind(self, attempt: int, step: int) -> bool:
        place = bisect_right(self._attempts, attempt)
        return place < len(self._attempts) and step > self._lowest[place]

    def _has_later(self, place: Key, attempt: int, step: int) -> bool:
        known, newer = self._known, self._newer
        if not any(step in steps for steps in (known.repeated.get(place), newer.places.get(place)) if steps is not None):
            return False  # one attempt alone has it
        later = (steps for keys in (known, newer) for other, steps in keys.of_attempt.get(place, {}).items() if other > attempt)
        return any(step in steps for steps in later)
