"""What the base model gives to the answers of every pair: computed once, by all ranks, before the first step, and kept beside the run on every node.

A later attempt takes the numbers that any of its ranks still has, so a run goes on with those that it began with, on whatever nodes. Where all are gone they
are computed again, and differ in the last digits at most, as losses do.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from homelab.shared.protocol import files, layout
from homelab.worker.balancing.balancer import Balance
from homelab.worker.data import row_agreement
from homelab.worker.data.batches import Form, copied
from homelab.worker.data.encoding import Row
from homelab.worker.model import pair_loss, pretrained
from homelab.worker.runtime import process_group
from homelab.worker.runtime.metrics_recorder import Recorder
from homelab.worker.runtime.task import Task


def fill(model: Any, rows: Sequence[Row], task: Task, balance: Balance, form: Form, recorder: Recorder) -> None:
    """Give each row its reference. `model` is the base: nothing is trained yet, and no checkpoint loaded. Collective."""
    if task.objective is None or not task.objective.compares_with_base:
        return
    digest = bytes.fromhex(row_agreement.digest(rows))
    file = task.run_dir / layout.REFERENCE
    kept = _read(file, digest, len(rows))
    device = next(model.parameters()).device
    numbers = torch.tensor(kept or [0.0] * 2 * len(rows), dtype=torch.float64, device=device)
    holders = [rank for rank, (has,) in enumerate(process_group.gather([float(kept is not None)])) if has]
    if holders and task.world_size > 1:
        dist.broadcast(numbers, holders[0])
    elif not holders:
        began_s = time.perf_counter()
        for place, pair in _computed(model, rows, task, balance, form, recorder):
            numbers[2 * place : 2 * place + 2] = pair
        process_group.wait_for_all("referenced", task.world_size)
        if task.world_size > 1:
            dist.all_reduce(numbers)  # each row is one rank's, and 0 on all others
        if task.rank == 0:
            took_s = time.perf_counter() - began_s
            recorder.note(f"reference: the base model has read {len(rows)} pairs in {took_s:.1f} s, once for the whole run")
    found = array("d", numbers.tolist())
    if kept is None and task.is_keeper:
        files.replace(file, digest + found.tobytes())
    for place, row in enumerate(rows):
        row.reference = (found[2 * place], found[2 * place + 1])


@torch.no_grad()
def _computed(model: Any, rows: Sequence[Row], task: Task, balance: Balance, form: Form, recorder: Recorder) -> Any:
    """(place, its two numbers) of every row that is this rank's."""
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    figures, one = pair_loss.figures_of(model), torch.tensor(1.0, device=device)
    own = balance.rows_of([len(row.tokens) for row in rows], task.rank)
    for cut in balance.passes_of([len(rows[place].tokens) for place in own], task.rank):
        places = [own[position] for position in cut]
        (inputs,) = copied([form.batch([rows[place] for place in places], packed=False)], device, pin=False)
        with torch.autocast(device.type, pretrained.DTYPES[task.precision], enabled=task.precision != "fp32"):
            model(**inputs, num_items_in_batch=one)
        answers = figures.summed_answers
        assert answers is not None
        yield from ((place, answers[2 * position : 2 * position + 2]) for position, place in enumerate(places))
        recorder.sign()
    figures.take()
    model.train(was_training)


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
