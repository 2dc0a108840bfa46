"""The run's curves up to now, as every checkpoint carries them (curves.jsonl): an attempt that resumes from it has the earlier steps.

One line per step and one per evaluation, in the words of metrics.jsonl. The figures that a rank measures of itself (seconds, tokens per
second) are those of rank 0, so that the file is the same on every node. Every line carries the chain (`homelab.shared.protocol.chain`).
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from homelab.shared.protocol import chain
from homelab.worker.runtime.metrics_recorder import forget_earlier, perplexity
from homelab.worker.runtime.task import Task

FILE = chain.RECORD
_FIGURES = ("time", "loss", "learning_rate", "grad_norm", "tokens_per_s", "step_s", "communication_s")
_MEASURED = {"grad_norm", "tokens_per_s", "step_s", "communication_s"}  # six digits are more than the measurement has
_LOSSES = {chain.TRAIN: "loss", chain.EVAL: "eval_loss"}  # kind -> its loss, of the lines that are points of a curve
_DECIDED = ("batch", "passes")
_TRAIN, _EVAL, _KEPT = 0.0, 1.0, 2.0
_WORD_DIGITS = 10  # of a digest in a float, which holds 13 exactly: 7 figures hold a sha256


class Curves:
    """What a run has shown so far. Lines are kept as text, which takes a tenth of the room: a run may have hundreds of thousands."""

    def __init__(self, task: Task, lines: list[dict[str, Any]] | None = None) -> None:
        every = lines or []
        self.chain = chain.end_of(every)
        self._is_chained = bool(self.chain) or (
            not every and task.resume_step == 0
        )  # an older version has begun the others without a chain
        self.eval_losses = {line["step"]: line["eval_loss"] for line in every if line["kind"] == chain.EVAL}
        steps = [(line["step"], line["loss"]) for line in every if line["kind"] == chain.TRAIN]
        self.first: tuple[int, float] | None = steps[0] if steps else None
        self.last: tuple[int, float] | None = steps[-1] if steps else None
        self.is_whole = [step for step, _ in steps] == list(range(1, task.resume_step + 1))
        self.of_pairs = task.objective is not None
        self._settled = [json.dumps(line) + "\n" for line in every]
        self._count_before = len(every)
        self._open: list[list[float]] = []
        self._decided: list[dict[str, str]] = []  # of each open line, what the law decides: the same on every rank
        self._devices = sorted({rank.device_name for rank in task.ranks})
        self._same = {"attempt": task.attempt, "rank": 0, "node": task.nodes[0]}

    @classmethod
    def carried_by(cls, folder: Path | None, task: Task) -> Curves:
        """The curves in a checkpoint; empty for a start from nothing, and for a checkpoint of an older version without them."""
        return cls(task, _read(folder / FILE, task.resume_step) if folder is not None else [])

    @classmethod
    def of_all(cls, folder: Path | None, task: Task) -> Curves:
        """The same on all ranks, which call it together. Where ranks were stopped in an evaluation, some of their checkpoints have its loss and
        others not: then it is made again on all of them. Half of them alone would wait in it for the others for ever.
        """
        from homelab.worker.runtime import process_group

        curves = cls.carried_by(folder, task)
        have_it = process_group.gather([float(task.resume_step in curves.eval_losses)])
        if folder is None or len({has for (has,) in have_it}) == 1:
            return curves
        lines = _read(folder / FILE, task.resume_step)
        return cls(task, [line for line in lines if (line["kind"], line["step"]) != (chain.EVAL, task.resume_step)])

    @property
    def before(self) -> Iterator[dict[str, Any]]:
        """The lines of earlier attempts, oldest first."""
        for text in itertools.islice(self._settled, self._count_before):
            line = json.loads(text)
            if line["kind"] in _LOSSES:
                yield line

    def start(self, facts: Mapping[str, Any]) -> None:
        """The first line: what is trained, and with which programs. Nothing where the run has begun already. `facts` are the same on every rank."""
        if self._is_chained and not self._settled:
            self._settle({"kind": chain.START, "step": 0, **facts})

    def train(self, line: Mapping[str, Any], time_s: float) -> None:
        """Add a finished step; `line` as in metrics.jsonl."""
        figures = {**line, "time": time_s}
        decided = {name: line[name] for name in _DECIDED if name in line}
        self._add(_TRAIN, line["step"], [_number(figures[name]) for name in _FIGURES], decided)
        self.last = (line["step"], line["loss"])
        self.first = self.first or self.last

    def evaluation(self, step: int, loss: float, time_s: float) -> None:
        """The loss over the held-out rows after this step."""
        figures = {"time": time_s, "loss": loss}
        self._add(_EVAL, step, [_number(figures.get(name)) for name in _FIGURES])
        self.eval_losses[step] = loss

    def kept(self, step: int, digest: str) -> None:
        """The checkpoint of this step stays, and its state has this sha256; rank 0's counts."""
        digest = digest or "0" * 64
        self._add(_KEPT, step, [float(int(digest[at : at + _WORD_DIGITS], 16)) for at in range(0, len(digest), _WORD_DIGITS)])

    def _add(self, kind: float, step: int, figures: list[float], decided: dict[str, str] | None = None) -> None:
        self._open.append([kind, float(step), *figures])
        self._decided.append(decided or {})

    def agree(self) -> None:
        """Take rank 0's figures for what came since the last call. Every rank calls it, after the same step."""
        from homelab.worker.runtime import process_group  # it imports torch, which some environments must import later

        everyone = process_group.gather([figure for row in self._open for figure in row]) if self._open else [[]]
        width = 2 + len(_FIGURES)
        self._settle_all([everyone[0][start : start + width] for start in range(0, len(everyone[0]), width)], {})

    def keep_own(self, task: Task) -> None:
        """Take this rank's own figures for what came since, where the others cannot be asked. Losses are the same on all ranks."""
        self._settle_all(self._open, {"rank": task.rank, "node": task.node})

    def _settle_all(self, rows: list[list[float]], own: dict[str, Any]) -> None:
        for row, decided in zip(rows, self._decided, strict=True):
            self._settle({**self._line(row), **decided, **(own if row[0] != _KEPT else {})})
        self._open, self._decided = [], []

    def _settle(self, line: dict[str, Any]) -> None:
        if self._is_chained:
            self.chain = chain.link(self.chain, line)
            line = {**line, chain.KEY: self.chain}
        self._settled.append(json.dumps(line) + "\n")

    def text(self) -> str:
        """The file, as of the last `agree` or `keep_own`."""
        return "".join(self._settled)

    def _line(self, row: list[float]) -> dict[str, Any]:
        kind, step, *figures = row
        if kind == _KEPT:
            digits = "".join(f"{int(word):0{_WORD_DIGITS}x}" for word in figures[:-1]) + f"{int(figures[-1]):04x}"
            return {"kind": chain.KEPT, "step": int(step), "sha256": digits, "devices": self._devices}
        value_of = {name: None if math.isnan(value) else value for name, value in zip(_FIGURES, figures, strict=True)}
        where = {"time": round(figures[0], 3), **self._same, "step": int(step)}
        if kind == _EVAL:
            return {
                "kind": "eval",
                **where,
                "eval_loss": value_of["loss"],
                "eval_perplexity": None if self.of_pairs else perplexity(figures[1]),
            }
        return {"kind": "train", **where} | {
            name: float(f"{value:.6g}") if value is not None and name in _MEASURED else value
            for name, value in value_of.items()
            if name != "time"
        }


def keep_before(task: Task, curves: Curves) -> None:
    """Write the earlier steps beside this attempt's own metrics: the checkpoint may be gone when a reader asks for them. They hold what those of
    the attempts before held.
    """
    path = task.rank_dir / FILE
    if task.rank != 0 or not any(curves.before):
        path.unlink(missing_ok=True)
        return
    partial = path.with_name(f".{FILE}.partial")
    partial.write_text(curves.text(), encoding="utf-8")
    os.replace(partial, path)
    forget_earlier(task, FILE)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _read(path: Path, most: int) -> list[dict[str, Any]]:
    """The lines up to step `most`, each step once: of a step that was done twice the later line counts."""
    try:
        lines = list(_objects(path.read_text(encoding="utf-8")))
    except OSError:
        return []
    kept = {(line["kind"], line["step"]): line for line in lines if line["step"] <= most}
    return sorted(kept.values(), key=chain.order_of)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    for part in text.splitlines():
        try:
            line = json.loads(part)
        except ValueError:
            continue
        kind = line.get("kind") if isinstance(line, dict) else None
        if not isinstance(kind, str) or not isinstance(line.get("step"), int):
            continue
        if kind in (chain.START, chain.KEPT) or (kind in _LOSSES and isinstance(line.get(_LOSSES[kind]), int | float)):
            yield line
