"""How fast this node's card trains: torchrun starts `python -m homelab.worker.tools.card_speed` as one rank, without a model, data or a run.

What is trained stands in `input.json` of the folder HOMELAB_COLLECTIVE_DIR: {"shape": config.json of the model, "method": [method], "train": [train],
"device", "precision", "micro_batch", "accumulation", "measure_s"}. Steps are those of the worker's own trainer, with weights and rows that are random.
The first WARM steps do not count. The results are [{"tokens_per_s", "peak_bytes", "steps", "torch"}] (`homelab.worker.tools.rank_state`).
"""

from __future__ import annotations

import json
import os
import random
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homelab.shared.protocol import collective_stages
from homelab.worker.errors import WorkerError
from homelab.worker.runtime import imports
from homelab.worker.runtime.metrics_recorder import peak_memory_bytes
from homelab.worker.runtime.task import Task
from homelab.worker.tools.rank_state import StateFile, leave, watched

if TYPE_CHECKING:
    from homelab.worker.data.rows import Row

WARM, LEAST, MOST = 3, 5, 200  # steps: kernels are chosen and memory is taken in the first ones
_ROWS = 64


class _Enough(Exception):
    """What was to be measured is."""


@dataclass
class _Clock:
    """Counts steps and seconds after the first ones, and ends the training when there are enough."""

    state: StateFile
    device: str
    step_tokens: int
    measure_s: float
    steps: int = 0
    began: float = 0.0
    seconds: float = 0.0

    def step(self, _trainer: Any) -> None:
        """A step is done."""
        self.steps += 1
        if self.steps == WARM:
            self._wait()
            self.began = time.perf_counter()
        counted, passed = self.steps - WARM, time.perf_counter() - self.began
        if self.steps <= WARM:
            self.state(results=[{"step": self.steps}])
            return
        self.state(results=[{"step": self.steps, "tokens_per_s": counted * self.step_tokens / passed}])
        if counted >= LEAST and (passed >= self.measure_s or counted >= MOST):
            self._wait()
            self.seconds = time.perf_counter() - self.began
            raise _Enough

    @property
    def tokens_per_s(self) -> float:
        """Over all steps that count."""
        return (self.steps - WARM) * self.step_tokens / self.seconds

    def _wait(self) -> None:
        """For what is queued on the card."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()


def run(state: StateFile) -> None:
    """Measure. Raises WorkerError where the card has no room, or a package is missing."""
    state(collective_stages.IMPORTING)
    asked = json.loads((state.folder / "input.json").read_text(encoding="utf-8"))
    task = task_of(asked, state.folder)
    imports.prepare(task.run, bitsandbytes=task.method.quantisation is not None)

    import torch

    imports.quiet()
    clock = _Clock(state, task.device, task.train.global_batch * task.train.seq_len, float(asked["measure_s"]))
    try:
        _train(task, asked["shape"], state, clock)
    except torch.OutOfMemoryError as error:
        hint = "end other programs on the card (nvidia-smi shows them), or measure with a smaller base: --method qlora"
        raise WorkerError(
            f"the card has no room for the test model: {str(error).splitlines()[0]}", where=f"node {task.node}", hint=hint
        ) from error
    result = {
        "tokens_per_s": clock.tokens_per_s,
        "peak_bytes": peak_memory_bytes(task.device),
        "steps": clock.steps - WARM,
        "torch": torch.__version__,
    }
    state(collective_stages.DONE, results=[result])


def task_of(asked: dict[str, Any], folder: Path) -> Task:
    """The task of one rank that has all rows."""
    batch = int(asked["micro_batch"]) * int(asked["accumulation"])
    recipe = {
        "model": {"name": str(folder)}, "data": {"train": "random"}, "method": asked["method"], "train": {**asked["train"], "global_batch": batch, "steps": WARM + MOST},
        "parallel": {"micro_batch": asked["micro_batch"]}, "checkpoint": {"keep": 1}, "tracking": {},
    }  # fmt: skip
    rank = {"rank": 0, "node": os.environ.get("HOMELAB_NODE", "here"), "share": batch, "micro_batch": asked["micro_batch"]}
    plan = {
        "world_size": 1, "backend": "gloo", "device": asked["device"], "precision": asked["precision"], "resume_step": 0, "strategy": "ddp", "balance": "fixed", "ranks": [rank],
    }  # fmt: skip
    return Task(folder, 1, rank["node"], 0, 0, 1, {"recipe": recipe, "recipe_hash": "", "data": {}}, plan)


def _train(task: Task, shape: dict[str, Any], state: StateFile, clock: _Clock) -> None:
    from homelab.shared.law.checkpoint_interval import Interval
    from homelab.worker.data.batches import Form
    from homelab.worker.model import fused_loss, packed_attention, random_weights
    from homelab.worker.model.build import load_model
    from homelab.worker.model.pretrained import DTYPES, LoadedPart
    from homelab.worker.runtime import process_group
    from homelab.worker.strategies.registry import strategy_of
    from homelab.worker.training.arguments import training_arguments
    from homelab.worker.training.trainer import Hooks, ShareTrainer

    state(collective_stages.MAKING)
    process_group.claim_device(task)
    model = load_model(task, str(random_weights.folder(state.folder / "model", shape)), print, LoadedPart(reader=random_weights.read))
    balance = task.balance()
    why_padded = packed_attention.use(model, next(model.parameters()).device, DTYPES[task.precision])
    if why_padded is None:
        balance.join_rows()
    process_group.connect(task)
    steps, strategy = WARM + MOST, strategy_of(task, WARM + MOST)
    form = Form(0, why_padded is None, fused_loss.takes_labelled(model))
    trainer = ShareTrainer(
        model=model, args=training_arguments(task, steps, strategy.arguments(), print),
        batches=strategy.batches(_rows(int(shape["vocab_size"]), task.train.seq_len), steps=steps, balance=balance, form=form), task=task, strategy=strategy,
        interval=Interval(10**9), hooks=Hooks(lambda _trainer: state(collective_stages.TRAINING), lambda: None, lambda _trainer: None, lambda: None, clock.step),
    )  # fmt: skip
    try:
        trainer.train()
    except _Enough:
        return
    raise AssertionError("the steps ended before the clock")


def _rows(vocabulary: int, length: int) -> list[Row]:
    """Rows of random tokens, all of `length`, whose loss counts everywhere."""
    from homelab.worker.data.rows import Row

    draw = random.Random(0)
    return [
        Row(array("i", (draw.randrange(vocabulary) for _ in range(length))), bytes([0, *[1] * (length - 1)]), (number,))
        for number in range(_ROWS)
    ]


if __name__ == "__main__":
    leave(watched(run))
