"""A whole training of the worker on stand-in cards: its own Run, ShareTrainer, Strategy, Balance, SpeedMeter, StepTimer, Checkpointing and evaluation.

Modelled are: transformers' loop around them (trainer.py of 5.23, _inner_training_loop), its `training_step`, the disk, and what torch does in
C++ for DistributedDataParallel (reducer.cpp of 2.13): `finalize_backward` waits for the futures of all buckets on the current stream, and before
the second step all ranks agree on the order of buckets (`sync_bucket_indices`: two broadcasts, which the host reads). The buckets themselves
and the calls of the hook are torch's, as are the gathers and sums of `fully_shard`, which is Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from homelab.shared.law.pipeline_schedule import most_in_flight
from homelab.shared.law.speed import Speed
from homelab.worker.checkpoints import checkpoint_folder, disk_space, fencing, weights
from homelab.worker.checkpoints.best_weights import BestWeights
from homelab.worker.checkpoints.curves import Curves
from homelab.worker.data import row_agreement
from homelab.worker.data.batches import Form
from homelab.worker.data.rows import Row
from homelab.worker.runtime.task import Task
from homelab.worker.strategies.pipeline import stage_model
from homelab.worker.strategies.registry import strategy_of
from homelab.worker.strategies.sharded import shards as sharded
from homelab.worker.training import step_line, trainer
from homelab.worker.training.checkpointing import Checkpointing
from homelab.worker.training.run import Run
from tests.worker.cards import ranks
from tests.worker.cards.card import OnCard, OnHost
from tests.worker.cards.model import Model, on_card
from tests.worker.cards.nccl import Rules
from tests.worker.harness import task_of

ROW_TOKENS, GLOBAL_BATCH, OPTIMIZER_S = 8, 12, 0.01
ROWS = [Row(array("i", [1] * ROW_TOKENS), bytes([0] + [1] * (ROW_TOKENS - 1)), (number,)) for number in range(4 * GLOBAL_BATCH)]


@dataclass(frozen=True)
class Training:
    """What is trained. `cards`: the cost of each rank's passes. `machines`: how many the ranks are on, as many on each. `is_tied`: the first stage of a
    pipeline and the last one share a weight."""

    strategy: str
    cards: Sequence[Speed]
    steps: int = 4
    machines: int = 0
    in_flight: Sequence[int] | None = None
    changes: tuple[tuple[str, Any], ...] = ()
    precision: str = "fp32"
    resume_step: int = 0
    is_tied: bool = False

    def task(self, folder: Path, rank: int) -> Task:
        size = len(self.cards)
        machines = self.machines or size
        nodes = [f"node{number * machines // size}" for number in range(size)]
        is_pipeline, waits = self.strategy == "pipeline", self.strategy in ("zero3", "hsdp")
        entries: list[dict[str, Any]] = []
        for number in range(size):
            share = GLOBAL_BATCH * (number == 0) if is_pipeline else GLOBAL_BATCH // size + (number < GLOBAL_BATCH % size)
            entry = {
                "rank": number,
                "node": nodes[number],
                "local_rank": nodes[:number].count(nodes[number]),
                "share": share,
                "micro_batch": 2,
            }
            if is_pipeline:
                flight = (self.in_flight or [most_in_flight(stage, size) for stage in range(size)])[number]
                entry["stage"] = {
                    "number": number,
                    "begin": number,
                    "end": number + 1,
                    "layers": size,
                    "work": 1 / size,
                    "in_flight": flight,
                }
            entries.append(entry)
        plan = {
            "backend": "nccl", "device": "cuda", "precision": self.precision, "strategy": self.strategy, "ranks": entries,
            "resume_step": self.resume_step, "balance": "fixed" if is_pipeline or waits else "measured",
        }  # fmt: skip
        changes = {"checkpoint__every_steps": 2, "parallel__micro_batch": 2, **dict(self.changes)}
        task = task_of(folder / nodes[rank] / "runs" / "run", nodes, rank=rank, plan=plan, **changes)
        return dataclasses.replace(task, local_rank=entries[rank]["local_rank"])


@dataclass
class Outcome:
    """`deadlock`: why it stood still. Of each rank: seconds of the passes of each step, by the worker and in truth, its rows in each, and its speed."""

    size: int
    deadlock: str = ""
    measured_s: list[list[float]] = field(default_factory=list)
    true_s: list[list[float]] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    speeds: list[Speed | None] = field(default_factory=list)
    runs: list[Run | None] = field(default_factory=list)
    end_s: float = math.nan

    def __post_init__(self) -> None:
        for name in ("measured_s", "true_s", "rows"):
            setattr(self, name, [[] for _ in range(self.size)])
        self.speeds, self.runs = [None] * self.size, [None] * self.size

    @property
    def error(self) -> float:
        """The largest relative error of a step's measured work, without the first two steps, which the worker leaves out, too."""
        pairs = [pair for mine in zip(self.measured_s, self.true_s, strict=True) for pair in list(zip(*mine, strict=True))[2:]]
        return max((abs(measured / true - 1) for measured, true in pairs if true), default=0.0)


class _Silent:
    """A recorder that writes nothing."""

    def __init__(self) -> None:
        self.total_steps, self.step, self.step_tokens = 0, 0, 0.0

    def __getattr__(self, _name: str) -> Any:
        return lambda *_values, **_options: None


class Copies(DistributedDataParallel):
    """torch's own, and what its C++ does with the card."""

    def __init__(self, model: Any, bucket_mb: float) -> None:
        super().__init__(model, init_sync=False, gradient_as_bucket_view=True, broadcast_buffers=False, bucket_cap_mb=bucket_mb)
        self.futures: list[Any] = []
        self._are_ordered = False

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        def kept(state, bucket):  # DDP refuses annotations that are strings
            future = hook(state, bucket)
            self.futures.append(future)
            return future

        super().register_comm_hook(state, kept)

    def finalize_backward(self) -> None:
        futures, self.futures = self.futures, []
        for future in futures:
            future.wait()
        if futures and not self._are_ordered:  # before the next forward pass, which comes with nothing between that sends
            self._are_ordered = True
            for _ in range(2):
                order = torch.zeros(4).as_subclass(OnCard)
                dist.broadcast(order, 0)
                order.cpu()


class _Accelerator:
    """accelerate's part."""

    scaler = None

    def __init__(self, size: int) -> None:
        self.num_processes = size
        self.wrapped: Any = None
        self.autocast = contextlib.nullcontext

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if isinstance(self.wrapped, Copies):
            self.wrapped.finalize_backward()

    def no_sync(self, wrapped: Any) -> Any:
        return wrapped.no_sync() if isinstance(wrapped, Copies) else contextlib.nullcontext()

    def unscale_gradients(self) -> None:
        pass


class _Optimizer:
    """AdamW, as far as a checkpoint has it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "lr": 0.1}]
        self.optimizer = self

    def state_dict(self) -> dict[str, Any]:
        state = {
            index: {"step": torch.tensor(1.0).as_subclass(OnHost), "exp_avg": weight.detach()}
            for index, weight in enumerate(self.param_groups[0]["params"])
        }
        return {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}


def _trainer_init(self: Any, *, model: Any, args: Any, train_dataset: Any, callbacks: Sequence[Any]) -> None:
    self.model, self.args, self.train_dataset, self.callbacks = model, args, train_dataset, callbacks
    self.state, self.model_accepts_loss_kwargs = SimpleNamespace(global_step=0), True
    self.lr_scheduler = SimpleNamespace(state_dict=dict)
    self.accelerator = _Accelerator(args.world_size)


def _training_step(self: Any, model: Any, batch: dict[str, Any], count: Any) -> torch.Tensor:
    """One pass, as trainer.py of 5.23 does it; `compute_loss` multiplies by the number of ranks."""
    model.train()
    loss: torch.Tensor = model(**batch, num_items_in_batch=count).loss
    self.accelerator.backward(loss)
    return loss.detach()


class Player:
    """Plays a training in a folder."""

    def __init__(self, training: Training, folder: Path, made: ranks.Ranks) -> None:
        self._training, self._folder, self._made = training, folder, made
        self.outcome = Outcome(made.size)

    def rank(self, rank: int) -> None:
        """The program of a rank: what `Run.go` does from where the ranks have met."""
        task, card, outcome = self._training.task(self._folder, rank), self._made.card, self.outcome
        task.run_dir.mkdir(parents=True, exist_ok=True)
        run = outcome.runs[rank] = Run(task, _Silent())  # type: ignore[arg-type]
        run.held_out, run.recorder.total_steps = ROWS[: GLOBAL_BATCH + 1], self._training.steps
        rows = {role: {"sha256": row_agreement.digest(ROWS), "commit": ""} for role in row_agreement.ROLES}
        row_agreement.refuse_other(rows, task, None)
        run.curves = Curves(task)
        run.best = BestWeights(task, run.curves, None)
        run.checkpointing = Checkpointing(task, run.recorder, run.curves, run.best, rows)
        run.strategy = strategy_of(task, self._training.steps)
        model: Any = Model(card, self._training.cards[rank], is_last=run.strategy.part.has_loss, is_bf16=task.precision == "bf16")
        model.is_tied = self._training.is_tied
        own = self._prepared(run, task, on_card(model) if task.stage else model)
        self._steps(own, rank)
        outcome.speeds[rank] = own.meter.speed
        run._finish(own)

    def _prepared(self, run: Run, task: Task, model: Any) -> trainer.ShareTrainer:
        strategy: Any = run.strategy
        strategy._check_wire = lambda _model: None  # a forward pass of the decoder alone, for its type
        args = SimpleNamespace(
            world_size=task.world_size, average_tokens_across_devices=False, n_gpu=1, gradient_accumulation_steps=1,
            device=torch.device("cuda", 0), max_grad_norm=1.0,
        )  # fmt: skip
        batches = strategy.batches(ROWS, steps=self._training.steps, balance=run.balance, form=Form(0))
        own = trainer.ShareTrainer(
            model=model, args=args, batches=batches, task=task, strategy=strategy, interval=run.checkpointing.interval,
            hooks=trainer.Hooks(run._before_first, run.recorder.sign, run._before_vote, run.checkpointing.parting.begin_change, run._after_step),
        )  # fmt: skip
        strategy.before_wrap(model)
        wrapped = model if strategy.places_model else Copies(model, task.parallel.bucket_size_mb / 2**20)
        own.model_wrapped = own.accelerator.wrapped = wrapped
        strategy.after_wrap(wrapped)
        own.optimizer = _Optimizer(model)
        return own

    def _steps(self, own: Any, rank: int) -> None:
        """transformers' loop."""
        card, outcome, (callback,) = self._made.card, self.outcome, own.callbacks
        callback.on_train_begin()
        items = iter(own.get_train_dataloader())
        for step in itertools.count(1):
            if step > self._training.steps:
                break
            (item,), count = own.get_batch_samples(items, 1, own.args.device)
            outcome.rows[rank].append(own.item.rows)
            before_s = card.busy_s[rank]
            own.training_step(own.model_wrapped, item, count)
            outcome.true_s[rank].append(card.busy_s[rank] - before_s)
            own._clip_grad_norm(own.model_wrapped)
            callback.on_pre_optimizer_step()
            card.launch("optimizer", OPTIMIZER_S)
            own.state.global_step = step
            outcome.measured_s[rank].append(sum(own.clock.passes_s))
            callback.on_step_end()
            own.model_wrapped.zero_grad()


@contextlib.contextmanager
def _replaced() -> Iterator[None]:
    """What the training meets beside the ranks: no disk, and transformers' Trainer as above."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOMELAB_BACKGROUND_BYTES", "0")
        patch.setattr(Trainer, "__init__", _trainer_init)
        patch.setattr(Trainer, "training_step", _training_step)
        patch.setattr(Trainer, "remove_callback", lambda *_: None)
        patch.setattr(checkpoint_folder, "write", lambda *_, **__: None)
        patch.setattr(checkpoint_folder, "retain", lambda *_, **__: None)
        patch.setattr(disk_space, "make", lambda *_: None)
        patch.setattr(weights, "write_final", lambda *_, **__: None)
        patch.setattr(step_line, "peak_memory_bytes", lambda _device: 0)
        patch.setattr(fencing, "check", lambda *_: None)
        patch.setattr(stage_model, "is_tied", lambda model: model.is_tied)
        patch.setattr(stage_model, "table_of", lambda model: ("layers.0.up.weight", model.layers[0].up.weight))
        patch.setattr(stage_model, "head_of", lambda model: model.layers[0].up.weight)
        on_host = init_device_mesh
        patch.setattr(sharded, "init_device_mesh", lambda _device, *shape, **names: on_host("cpu", *shape, **names))
        yield


def play(training: Training, folder: Path, rules: Rules | None = None) -> Outcome:
    """All of it, from the agreement on rows to the end."""
    with _replaced(), ranks.of(len(training.cards), rules) as made:
        player = Player(training, folder, made)
        player.outcome.deadlock = made.play(player.rank)
        player.outcome.end_s = made.end_s
    return player.outcome
