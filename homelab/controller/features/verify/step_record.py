"""The record of a run as its nodes give it: the chain of its lines, the checkpoints that it names, and the windows between them. Pure."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, ValidationError

from homelab.controller.base.models import Value, WireModel
from homelab.shared.protocol import chain, files

_MOST_STEP = 10**12
_MOST_MARKS = 2 * 1_000_000  # two for each row of the largest global batch of a recipe


class RecordLine(WireModel):
    """What this program uses of a line; the chain is computed over all of it."""

    kind: Annotated[str, Field(max_length=20)]
    step: Annotated[int, Field(strict=True, ge=0, lt=_MOST_STEP)]
    loss: Annotated[float | None, Field(allow_inf_nan=False)] = None
    learning_rate: Annotated[float | None, Field(allow_inf_nan=False)] = None
    batch: Annotated[str, Field(max_length=64)] = ""
    passes: Annotated[str, Field(max_length=_MOST_MARKS)] = ""
    sha256: Annotated[str, Field(max_length=64)] = ""
    devices: Annotated[tuple[Annotated[str, Field(max_length=200)], ...], Field(max_length=1000)] = ()
    attempt: int | None = None
    chain: Annotated[str, Field(max_length=64)] = ""


class RecordStart(WireModel):
    """The first line: what is trained, and with which programs."""

    recipe_hash: Annotated[str, Field(max_length=64)] = ""
    precision: Annotated[str, Field(max_length=20)] = ""
    rows: Annotated[dict[str, Annotated[str, Field(max_length=64)]], Field(max_length=10)] = {}
    model: Annotated[str | None, Field(max_length=64)] = None
    versions: Annotated[dict[str, Annotated[str, Field(max_length=100)]], Field(max_length=50)] = {}


class RecordFault(Value):
    """What is wrong with the record, and at which step it begins."""

    step: int
    text: str


class Window(Value):
    """The steps after `begin` up to `end`. Both are kept checkpoints; 0 is the beginning of the training."""

    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.begin}..{self.end}"


class StepRecord:
    """`raw`: the lines as they were read, for the chain alone; `lines`: the same, typed."""

    def __init__(self, text: str) -> None:
        self._raw: Sequence[Mapping[str, Any]] = files.json_objects(text.splitlines())
        self._is_cut = len(self._raw) != sum(bool(line.strip()) for line in text.splitlines())
        self.lines: list[RecordLine] = []
        self.unreadable: int | None = None  # the position of the first line that is none
        for position, line in enumerate(self._raw):
            try:
                self.lines.append(RecordLine.model_validate(line))
            except ValidationError:
                self.unreadable = position if self.unreadable is None else self.unreadable
                self.lines.append(RecordLine(kind="", step=0))
        self.steps = {line.step: line for line in self.lines if line.kind == chain.TRAIN and line.loss is not None}
        self.devices = {line.step: line.devices for line in self.lines if line.kind == chain.KEPT}
        self.kept = {line.step: line.sha256 for line in self.lines if line.kind == chain.KEPT and line.sha256.strip("0")}

    @property
    def end(self) -> str:
        """The chain as the last line says it; "" for the record of an older version."""
        return chain.end_of(self._raw)

    @property
    def last_step(self) -> int:
        """The last step of which there is a loss."""
        return max(self.steps, default=0)

    @property
    def start(self) -> RecordStart | None:
        """None where the first line is no such line, as in the record of an older version."""
        if not self.lines or self.lines[0].kind != chain.START:
            return None
        try:
            return RecordStart.model_validate(self._raw[0])
        except ValidationError:
            return None

    def faults(self, card_end: str, *, least_steps: int = 0) -> list[RecordFault]:
        """What was changed in the record after it was written. `card_end`: the end of the chain in the model card, "" where there is no card.

        `least_steps`: so many steps are known to be done. Nothing is said of what was wrong before it was written.
        """
        found = list(self._broken())
        if not found and card_end and card_end != self.end:
            found.append(RecordFault(step=self.last_step, text=f"the record ends after step {self.last_step} with the chain {self.end[:12]}, the model card"
                               f" says {card_end[:12]}: lines at the end are missing, or were written anew"))  # fmt: skip
        if not found and self.last_step < least_steps:
            found.append(
                RecordFault(
                    step=self.last_step, text=f"the record ends after step {self.last_step}, and the run has done step {least_steps}"
                )
            )
        return found

    def _broken(self) -> Iterator[RecordFault]:
        """At most one: nothing after it can be judged."""
        position = self.unreadable if self.unreadable is not None else chain.first_break(self._raw)
        if position is None:
            if self._is_cut:
                yield RecordFault(step=self.last_step, text="a line of the record is no JSON object")
            return
        line, before = self.lines[position], self.lines[:position]
        step = line.step
        order = [chain.order_of({"step": one.step, "kind": one.kind}) for one in (*before[-1:], line)]
        if self.unreadable == position:
            step, text = (before[-1].step if before else 0), "the line after that of step {} is damaged"
        elif order != sorted(order):
            text = "the line of step {} stands in the wrong place: lines were exchanged"
        elif before and line.kind == chain.TRAIN and step > max((one.step for one in before if one.kind == chain.TRAIN), default=0) + 1:
            text = "lines before that of step {} are missing or stand elsewhere"
        else:
            text = "the line of step {} was changed, or one just before it was taken out"
        yield RecordFault(step=step, text=text.format(step))

    def windows(self) -> list[Window]:
        """From each kept checkpoint to the next, the first one from the beginning."""
        steps = [0, *sorted(step for step in self.kept if step > 0)]
        return [Window(begin=begin, end=end) for begin, end in itertools.pairwise(steps)]

    def chosen(self, count: int) -> list[Window]:
        """So many windows, at most all of them. The end of the chain chooses: whoever wrote the record could not know which before it was whole."""
        windows = self.windows()
        ranked = sorted(windows, key=lambda window: hashlib.sha256(f"{self.end} {window}".encode()).hexdigest())
        return sorted(ranked[:count], key=lambda window: window.begin)


def missed_chance(windows: int, of: int, forged: int) -> float:
    """The chance that none of `windows` windows, chosen from `of`, is one of the `forged` ones."""
    return math.comb(of - forged, windows) / math.comb(of, windows) if forged <= of else 0.0
