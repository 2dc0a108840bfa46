"""What the cards of this node use while an attempt runs: their power, sampled every ten seconds, added up in energy.json beside the attempt's logs.

Source of the field: `nvidia-smi --help-query-gpu` (power.draw: the mean of the last second on newer cards; "[N/A]" where a card does not tell it).
"""

from __future__ import annotations

import contextlib
import csv
import os
import threading
import time
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.system import programs
from homelab.shared.protocol import files, layout, message
from homelab.shared.protocol.run_messages import CardJoules, Energies

if TYPE_CHECKING:
    from homelab.shared.protocol.request import RunRequest

EVERY_S = 10.0
_GAP_S = 3 * EVERY_S  # the machine slept, or the driver did not answer: nothing is known of that time
_ANSWER_S = 8.0
_LAST_S = 2.0  # for the last sample: the end of the attempt is not told later for it
_FIELDS = "index,uuid,name,power.draw"


class Totals:
    """Joules of each card, by the trapezoid of two samples. Pure: the time is given, in seconds of a clock that goes on while the machine sleeps."""

    def __init__(self) -> None:
        self.cards: dict[str, CardJoules] = {}
        self._last: dict[str, tuple[float, float]] = {}  # uuid -> when, watts
        self._at_s: float | None = None

    def add(self, sample: list[tuple[int, str, str, float | None]], at_s: float) -> None:
        """`sample`: index, uuid, name and watts (None: not told) of each card."""
        passed_s = at_s - self._at_s if self._at_s is not None else 0.0
        for index, uuid, name, watts in sample:
            card = self.cards.get(uuid) or CardJoules(index=index, uuid=uuid, name=name)
            last = self._last.pop(uuid, None)
            if watts is None or last is None or not 0 <= at_s - last[0] <= _GAP_S:
                self.cards[uuid] = card.replace(unmeasured_s=card.unmeasured_s + max(0.0, passed_s))
            else:
                joules = (card.joules or 0.0) + (last[1] + watts) / 2 * (at_s - last[0])
                self.cards[uuid] = card.replace(joules=joules, measured_s=card.measured_s + at_s - last[0])
            if watts is not None:
                self._last[uuid] = (at_s, watts)
        self._at_s = at_s

    def missed(self, at_s: float) -> None:
        """Nothing was measured from the last sample to now."""
        passed_s = max(0.0, at_s - (self._at_s if self._at_s is not None else at_s))
        self.cards = {uuid: card.replace(unmeasured_s=card.unmeasured_s + passed_s) for uuid, card in self.cards.items()}
        self._last, self._at_s = {}, at_s


class Meter:
    """A context manager around one attempt. Without nvidia-smi it does nothing."""

    def __init__(self, node_dir: str) -> None:
        self._program = programs.path_of("nvidia-smi")
        self._path = os.path.join(node_dir, layout.ENERGY_JSON)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True, name="energy")
        self._totals = Totals()

    def __enter__(self) -> Meter:
        if self._program:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._program:
            self._thread.join(_LAST_S)

    def _measure(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.is_set()
            sample = self._sample()
            if not sample:
                # A question that hangs in the driver leaves its program behind: it is not asked again, and the rest of the time is unknown.
                if not self._totals.cards:
                    return
                self._ended.wait()
                is_last = True
                self._totals.missed(time.time())
            else:
                self._totals.add(sample, time.time())
            with contextlib.suppress(OSError):  # a disk that is full: the attempt has worse trouble
                files.write_json(self._path, {"cards": [message.fields(card) for card in self._totals.cards.values()]})
            self._ended.wait(EVERY_S)

    def _sample(self) -> list[tuple[int, str, str, float | None]]:
        """What the cards use now; nothing where the driver does not say it."""
        assert self._program
        try:
            code, output, _ = programs.answer_of([self._program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"], _ANSWER_S)
        except (OSError, TimeoutError):
            return []
        return parse(output) if code == 0 else []


def parse(text: str) -> list[tuple[int, str, str, float | None]]:
    """(index, uuid, name, watts or None) of each line of the answer; other lines are left out."""
    cards = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != 4 or not row[0].strip().isdigit():
            continue
        try:
            watts: float | None = float(row[3])
        except ValueError:
            watts = None
        cards.append((int(row[0]), row[1].strip(), row[2].strip(), watts if watts is not None and 0 <= watts < 1e5 else None))
    return cards


def energies(request: RunRequest) -> Energies:
    """{"attempts": {number: cards}} of this node in a run."""
    folder = paths.run_dir(request.workdir, request.run)
    attempts = {}
    for number in paths.attempts(folder):
        node_dir = paths.node_dir(folder, number, paths.name_here(folder, number, request.node))
        cards = (files.read_object(os.path.join(node_dir, layout.ENERGY_JSON)) or {}).get("cards")
        if isinstance(cards, list):
            attempts[str(number)] = message.as_written(cards)
    return Energies(attempts=attempts)
