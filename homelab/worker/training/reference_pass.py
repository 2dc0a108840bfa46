"""What the base model gives to the two answers of every row: computed once, by all ranks, before the first step, and kept beside the run on every node.

A later attempt takes the numbers that any of its ranks still has, so a run goes on with those that it began with, on whatever nodes. Where all are gone,
adapters are left out for this one pass, and the numbers differ in the last digits at most, as losses do.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from homelab.shared.protocol import files, layout
from homelab.worker.data import row_agreement
from homelab.worker.data.rows import Row
from homelab.worker.errors import TrainingError
from homelab.worker.model import pair_loss
from homelab.worker.runtime import process_group
from homelab.worker.runtime.metrics_recorder import Recorder
from homelab.worker.runtime.task import Task
from homelab.worker.training.trainer import ShareTrainer


def fill(trainer: ShareTrainer, rows: Sequence[Row], recorder: Recorder) -> None:
    """Give each row its reference, where the objective asks for one. Collective. Raises TrainingError where the base is there no more."""
    task, objective = trainer.task, trainer.task.objective
    if objective is None or not objective.compares_with_base:
        return
    digest = bytes.fromhex(row_agreement.digest(rows))
    file = task.run_dir / layout.REFERENCE
    kept = _read(file, digest, len(rows))
    numbers = torch.tensor(kept or [0.0] * 2 * len(rows), dtype=torch.float64, device=trainer.args.device)
    holders = [rank for rank, (has,) in enumerate(process_group.gather([float(kept is not None)])) if has]
    if holders and task.world_size > 1:
        dist.broadcast(numbers, holders[0])
    elif not holders:
        began_s = time.perf_counter()
        for first, of_row in _computed(trainer, rows, recorder):
            numbers[first : first + len(of_row)] = of_row
        process_group.wait_for_all("referenced", task.world_size)
        if task.world_size > 1:
            dist.all_reduce(numbers)  # each row is one rank's, and 0 on all others
        if task.rank == 0:
            took_s = time.perf_counter() - began_s
            recorder.note(f"reference: the base model has read {len(rows)} rows in {took_s:.1f} s, once for the whole run")
    found = array("d", numbers.tolist())
    if kept is None and task.is_keeper:
        files.write_atomic(file, digest + found.tobytes())  # no checkpoint has it, and none can be without it
    for place, row in enumerate(rows):
        row.reference = (found[2 * place], found[2 * place + 1])
        if row.other is not None:
            row.other.reference = (row.reference[1], 0.0)


@torch.no_grad()
def _computed(trainer: ShareTrainer, rows: Sequence[Row], recorder: Recorder) -> Iterator[tuple[int, torch.Tensor]]:
    """(where they stand, the numbers) of every row whose loss this rank computes: both of a pair, or one of a judged answer and one of its other row."""
    strategy, data = trainer.strategy, trainer.train_dataset
    own = data.balance.rows_of([row.longer_tokens for row in rows], strategy.counting_rank)
    cuts = data.balance.passes_of([rows[place].longer_tokens for place in own], strategy.counting_rank)
    places = [[own[position] for position in cut] for cut in cuts]
    passes = [[(2 * place, rows[place]) for place in cut] for cut in places]
    passes += [others for cut in places if (others := [(2 * place + 1, row) for place in cut if (row := rows[place].other) is not None])]
    found: list[torch.Tensor] = []

    def after_pass() -> None:
        recorder.sign()
        if strategy.part.has_loss and len(found) < len(passes):  # passes over stand-ins come after them
            answers = pair_loss.figures_of(trainer.model).summed_answers
            assert answers is not None
            found.append(answers)

    with _base(trainer):
        trainer.model.eval()
        batches = [data.form.batch([row for _, row in of_pass], packed=False) for of_pass in passes]
        strategy.evaluate(trainer.model, batches, data.form, after_pass)
    if strategy.part.has_loss:
        pair_loss.figures_of(trainer.model).take()
    for of_pass, answers in zip(passes, found, strict=False):
        yield from zip((first for first, _ in of_pass), answers.split(len(answers) // len(of_pass)), strict=True)


def _base(trainer: ShareTrainer) -> contextlib.AbstractContextManager[Any]:
    """Around passes of the base: before the first step it is the model, and later the model without its adapters, if these began at nothing."""
    task: Task = trainer.task
    if not task.resume_step:
        return contextlib.nullcontext()
    if task.method.kind == "full" or task.model.adapter is not None:
        raise TrainingError(
            "the model that the run began with was trained already, and no node has what it gave to the answers",
            where=f"{layout.REFERENCE} in the folder of the run, on {', '.join(sorted(set(task.nodes)))}",
            hint=f"let a node take part that has the file, then homelab recover {task.run_dir.name}; or launch the recipe again",
        )
    without: contextlib.AbstractContextManager[Any] = trainer.model.disable_adapter()
    return without


def _read(file: Path, digest: bytes, rows: int) -> list[float] | None:
    """The numbers of these rows; None where the file is not there, or of others."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    numbers = array("d")
    if content[: len(digest)] != digest or len(content) != len(digest) + 2 * rows * numbers.itemsize:
        return None
    numbers.frombytes(content[len(digest) :])
    return list(numbers)
