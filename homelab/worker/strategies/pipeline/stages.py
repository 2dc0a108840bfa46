"""The strategy "pipeline": each rank holds some layers of one model, and the micro-batches of a step go through all of them.

Only activations and their gradients cross the wire. Every rank makes the micro-batches of the whole global batch, which are those of one
process; the last one computes the loss. Each steps its own weights, after one sum of squares for the norm of the gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from homelab.shared.law.stage import Stage
from homelab.shared.law.streaming import WORDS
from homelab.shared.protocol.model_forms import HISTORY
from homelab.worker.balancing.balancer import Balance
from homelab.worker.checkpoints import optimizer_state, tensor_files, weights
from homelab.worker.data.batches import Batch, Form, StepBatches, StepItem, copied
from homelab.worker.data.rows import Row
from homelab.worker.errors import WorkerError
from homelab.worker.model import host_layers, layer_seeds
from homelab.worker.model.layer_major import LayerMajor
from homelab.worker.model.pretrained import DTYPES, LoadedPart
from homelab.worker.runtime import process_group
from homelab.worker.runtime.step_timer import StepTimer
from homelab.worker.runtime.task import Task
from homelab.worker.strategies import gradient_norm
from homelab.worker.strategies.base import Strategy
from homelab.worker.strategies.pipeline import stage_model, stage_reader, stages_state
from homelab.worker.strategies.pipeline.neighbours import Neighbours
from homelab.worker.strategies.pipeline.passes import PipelinePasses
from homelab.worker.strategies.pipeline.shared_table import CopiesCheck, SharedTable


class StageBatches(StepBatches):
    """`StepBatches` of rank 0, to which a pipeline gives all rows. Data rows count once, on the first stage; tokens count by what each computes of them."""

    stage: Stage

    def __getitem__(self, step: int) -> StepItem:
        item = super().__getitem__(step)
        return dataclasses.replace(
            item, sources=item.sources if self.stage.is_first else [], input_tokens=round(item.input_tokens * self.stage.work)
        )


class Stages(Strategy):
    """One stage of a model, between its neighbours."""

    def __init__(self, task: Task) -> None:
        stage = task.stage
        assert stage is not None and task.world_size > 1, "a pipeline has stages"
        super().__init__(task)
        self.stage = stage
        self._device = torch.device(task.device, task.local_rank) if task.device == "cuda" else torch.device("cpu")
        self._dtype = torch.float32 if task.method.kind == "full" else DTYPES[task.precision]
        self._neighbours: Neighbours | None = None
        self._table: SharedTable | None = None
        self._copies: CopiesCheck | None = None  # None where no weight is on two stages
        self._collect = process_group.gather  # timed, once there is a timer
        self._sent_bytes = 0

    @property
    def counting_rank(self) -> int:
        return self._task.stage_ranks[0]

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes

    @property
    def places_model(self) -> bool:
        return True

    @property
    def part(self) -> LoadedPart:
        stage = self.stage
        words = f"pipeline: layers {stage.begin} to {stage.end - 1} of {stage.layers}, stage {stage.number + 1} of {stage.count}"
        scores = self._task.objective is not None and self._task.objective.scores
        if streaming := self._task.streaming:
            words += f"; {streaming.layers} of them come from this machine's {WORDS[streaming.host]}"
        reader = stage_reader.reader(self._task, stage, scores=scores)
        return LoadedPart(reader, takes_kept=True, is_stage=True, words=words, has_loss=stage.is_last)

    def batches(self, rows: Sequence[Row], *, steps: int, balance: Balance, form: Form) -> StepBatches:
        batches = self._batches_as(StageBatches, rows, steps, balance, form)
        assert isinstance(batches, StageBatches)
        batches.stage = self.stage
        return batches

    def before_wrap(self, model: Any) -> None:
        task, stage = self._task, self.stage
        self._neighbours = Neighbours.of(task.rank, task.stage_ranks)
        if task.method.kind != "full" or not stage_model.is_tied(model):
            return
        if stage.is_first or stage.is_last:
            name, weight = stage_model.table_of(model)
            if stage.is_last and stage_model.head_of(model) is not weight:
                raise WorkerError(
                    "config.json says that the head is the table of embeddings, but the files have another tensor for each of them",
                    where="[model] name in the recipe: tie_word_embeddings in its config.json", needs_launch=True,
                    hint="set tie_word_embeddings to false in the config.json of a copy of the model, on each node, and give [model] name this folder",
                )  # fmt: skip
            peer = task.stage_ranks[0 if stage.is_last else -1]
            self._table = SharedTable(name, weight, peer, self._neighbours.group, self._device, is_second=stage.is_last)
        self._copies = CopiesCheck(task, self._table)

    def reduce_gradients(self, wrapped: Any, timer: StepTimer) -> None:
        self._collect = timer.gather

    def run_passes(self, trainer: Any, model: Any, item: Any, count: torch.Tensor) -> float:
        """All passes of a step over the micro-batches of the whole batch; the loss of this rank."""
        model.train()
        batches = item.micro_batches if trainer.copies_ahead else copied(item.micro_batches, self._device, pin=self._device.type == "cuda")
        pipeline = self._pipeline(model, trainer.accelerator.autocast, trainer.hooks.after_pass)
        loss, work = pipeline.step(batches, item.seeds, count, trainer.accelerator.backward)
        self._sent_bytes = work.sent_bytes
        if self._table is not None:
            took_s, sent_bytes = self._table.sum_gradients(trainer.hooks.after_pass)
            work.waited_s += took_s
            self._sent_bytes += sent_bytes
        trainer.clock.count_passes(work.passes_s, work.waited_s)
        return loss

    def evaluate(self, model: Any, batches: Sequence[Batch], form: Form, after_pass: Callable[[], None]) -> float:
        """On the last rank; 0 on the others."""
        pipeline = self._pipeline(model, contextlib.nullcontext, after_pass)
        loss: float = pipeline.summed_losses(batches, torch.tensor(1, device=self._device))
        return loss

    def _pipeline(self, model: Any, context: Callable[[], AbstractContextManager[Any]], after_pass: Callable[[], None]) -> PipelinePasses:
        assert self._neighbours is not None, "they are there before the first pass"
        hidden, host = int(model.config.get_text_config().hidden_size), host_layers.of(model)
        layer_major = None
        if host is not None:
            numbers = range(self.stage.begin, self.stage.end)
            layer_major = LayerMajor(stage_model.decoder_of(model), numbers, host, context, layer_seeds.begin, after_pass)
        return PipelinePasses(model, self.stage, self._neighbours, self._dtype, self._device, hidden, context, after_pass, layer_major)

    def clip(self, model: Any, most: float) -> float:
        second = self._table.weight if self._table is not None and self._table.is_second else None
        counted = [parameter.grad for parameter in model.parameters() if parameter.grad is not None and parameter is not second]
        copies = [second.grad] if second is not None and second.grad is not None else []
        norm: float = gradient_norm.clip(counted, most, lambda square: sum(values[0] for values in self._collect([square])), copies)
        return norm

    @property
    def saves_alone(self) -> bool:
        return False

    def state(self, trainer: Any) -> dict[str, Any]:
        is_kept = self._task.is_keeper
        state = {
            weights.WEIGHTS: self.whole_weights(trainer.model),
            weights.OPTIMIZER: stages_state.whole_optimizer(
                trainer.optimizer.optimizer, self._task.stage_ranks, self._device, self._table, is_kept=is_kept
            ),
        }
        return state if is_kept else {}

    def whole_weights(self, model: Any, part: Callable[[Any], dict[str, Any]] = weights.trained) -> dict[str, torch.Tensor]:
        own = part(model)
        if self._table is not None and self._table.is_second:
            own.pop(self._table.name, None)  # the first stage sends it
        return stages_state.gathered(own, self._device, is_kept=self._task.is_keeper)

    def load_weights(self, model: Any, checkpoint: Path) -> None:
        tensor_files.fill(weights.trained(model), checkpoint / weights.WEIGHTS, is_part=True)

    def load_optimizer(self, optimizer: Any, checkpoint: Path, device: Any) -> None:
        whole = torch.load(checkpoint / weights.OPTIMIZER, map_location="cpu", mmap=True, weights_only=True)
        own = stages_state.own_optimizer(whole, optimizer, self._task.stage_ranks, self._table)
        optimizer_state.load_own(optimizer, own, self._device)

    def check_start(self, model: Any, where: str) -> str | None:
        """The stages must be those of one model: each layer once, of one width and one configuration."""
        config = {key: value for key, value in model.config.to_dict().items() if key not in HISTORY}  # a folder's path is each node's own
        own_digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
        digests = process_group.exchange("configuration", own_digest)
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if odd:
            raise WorkerError(
                f"the stages are not of one model: the configuration on {self._task.named(*odd)} differs from that on {self._task.named(0)}",
                where=f"{self._task.model.name} ([model] name in the recipe)", hint="copy the same model folder to every node",
            )  # fmt: skip
        self._check_wire(model)
        if self._task.method.draws:
            model.train()
            stage_model.check(model)  # what draws between the layers would do so on every stage
        if self._copies is not None:
            self._copies.refuse_unequal(where)
        return None

    def check_weights(self, model: Any, step: int) -> str | None:
        return None if self._copies is None else self._copies.compare(step)

    @torch.no_grad()
    def _check_wire(self, model: Any) -> None:
        """What a layer gives out must be of the type that crosses the wire: a change of type would round, and one process does not."""
        decoder = stage_model.decoder_of(model)
        width = int(model.config.get_text_config().hidden_size)
        enabled = self._task.precision != "fp32"
        with torch.autocast(self._device.type, DTYPES[self._task.precision], enabled=enabled):
            given = torch.zeros((1, 2, width), dtype=self._dtype, device=self._device)
            layer_norm, decoder.norm = decoder.norm, stage_model.Elsewhere(decoder.norm)
            try:
                out = decoder(inputs_embeds=given).last_hidden_state.dtype
            finally:
                decoder.norm = layer_norm
        if out != self._dtype:
            raise WorkerError(
                f"{type(model).__name__} computes hidden states in {out}, but the pipeline would send them as {self._dtype}",
                where="[parallel] strategy in the recipe", hint='[train] precision = "fp32", or another strategy', needs_launch=True,
            )  # fmt: skip


def make(task: Task, steps: int) -> Strategy:
    """The strategy of a task; a pipeline needs no number of steps."""
    return Stages(task)
