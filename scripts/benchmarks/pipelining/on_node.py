"""Run by torchrun on every node: the speed of each rank alone, and steps of a pipeline, by this project's order and by torch's Schedule1F1B, in turn.

Its one argument is JSON: {"shape": {...}, "tokens", "rounds", "cuts": {name: layers of each stage}, "steps": [[name, cut, micro-batches], ...]}. Rank 0
writes result.json into the run's folder: {"alone_s": [[seconds of one pass by rank] per round], "steps": {name: [seconds per round]}, "busy_s": {name: [[by rank] per round]}}.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaConfig, LlamaForCausalLM

from homelab.shared.law.pipeline_schedule import most_in_flight
from homelab.shared.law.stage import Stage
from homelab.shared.recipe import Method
from homelab.worker.model.build import add_adapters
from homelab.worker.strategies.pipeline import stage_model
from homelab.worker.strategies.pipeline.neighbours import Neighbours
from homelab.worker.strategies.pipeline.passes import PipelinePasses

_ALONE_PASSES = 3
_WARMING = 4  # micro-batches


def main() -> None:
    """Measure, `rounds` times."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = model_of(asked["shape"], None)
    stages = {name: model_of(asked["shape"], stage_of(layers, rank)) for name, layers in asked["cuts"].items()}
    neighbours = Neighbours.of(rank, list(range(ranks)))
    result: dict[str, Any] = {
        "alone_s": [],
        "steps": {name: [] for name, *_ in asked["steps"]},
        "busy_s": {name: [] for name, *_ in asked["steps"]},
    }
    for turn in range(asked["rounds"] + 1):  # the first one warms up
        dist.barrier()
        alone_s = pass_s(whole, asked["tokens"])
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, alone_s)
        if turn:
            result["alone_s"].append(everyone)
        steps = asked["steps"]
        for name, cut, micro_batches in steps[turn % len(steps) :] + steps[: turn % len(steps)] if steps else []:
            own_step(stages[cut], neighbours, asked, _WARMING)  # what was measured before has left its memory behind
            by_torch = name.startswith("torch")
            run = functools.partial(torch_step if by_torch else own_step, stages[cut], neighbours, asked, micro_batches)
            dist.barrier()
            before = time.perf_counter()
            busy_s = run()
            dist.barrier()
            step_s = time.perf_counter() - before
            busy: list[Any] = [None] * ranks
            dist.all_gather_object(busy, busy_s)
            if turn:
                result["steps"][name].append(step_s)
                result["busy_s"][name].append(busy)
    if rank == 0:
        (Path(os.environ["HOMELAB_RUN_DIR"]) / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def stage_of(layers: list[int], rank: int) -> Stage:
    """This rank's stage of a cut."""
    begin = sum(layers[:rank])
    return Stage(rank, len(layers), begin, begin + layers[rank], sum(layers), in_flight=most_in_flight(rank, len(layers)))


def model_of(shape: dict[str, int], stage: Stage | None) -> tuple[Any, Stage | None]:
    """The same random model on every node, or a stage of it, with adapters."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**shape, use_cache=False))
    if stage is not None:
        stage_model.cut(base, stage, torch.float32)
    return add_adapters(base, Method(kind="lora", rank=8, alpha=16, dropout=0.0, targets="all-linear"), 0).train(), stage


def rows_of(asked: dict[str, Any], count: int) -> torch.Tensor:
    """The same tokens on every node."""
    return torch.randint(3, asked["shape"]["vocab_size"], (count, asked["tokens"]), generator=torch.Generator().manual_seed(count))


def pass_s(model: tuple[Any, Stage | None], tokens: int) -> float:
    """Seconds of one pass of the whole model, forward and backward, while every other node does the same."""
    row = torch.arange(3, 3 + tokens).unsqueeze(0) % 1000 + 3
    before = time.perf_counter()
    for _ in range(_ALONE_PASSES):
        model[0](input_ids=row, labels=row, num_items_in_batch=torch.tensor(tokens)).loss.backward()
    took_s = (time.perf_counter() - before) / _ALONE_PASSES
    model[0].zero_grad(set_to_none=True)
    return took_s


def own_step(model: tuple[Any, Stage | None], neighbours: Neighbours, asked: dict[str, Any], micro_batches: int) -> float:
    """A step by this project's order; the seconds in which this rank computes."""
    peft, stage = model
    assert stage is not None, "this is a step of stages"
    pipeline = PipelinePasses(
        peft, stage, neighbours, torch.float32, torch.device("cpu"), asked["shape"]["hidden_size"], contextlib.nullcontext, lambda: None
    )
    rows = rows_of(asked, micro_batches)
    batches = [{"input_ids": row.unsqueeze(0), "labels": row.unsqueeze(0)} for row in rows]
    _, work = pipeline.step(batches, [0] * micro_batches, torch.tensor(rows.numel()), lambda loss: loss.backward())
    peft.zero_grad(set_to_none=True)
    return sum(work.passes_s)


class Part(torch.nn.Module):
    """A stage as torch's pipeline wants it: one tensor in, one out."""

    def __init__(self, model: Any, stage: Stage) -> None:
        super().__init__()
        self.model, self.is_first = model, stage.is_first

    def forward(self, entered: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.model(input_ids=entered) if self.is_first else self.model(inputs_embeds=entered)).logits
        return out


def torch_step(model: tuple[Any, Stage | None], neighbours: Neighbours, asked: dict[str, Any], micro_batches: int) -> None:
    """The same step by torch's own schedule on the same cut."""
    peft, stage = model
    assert stage is not None, "this is a step of stages"
    rows = rows_of(asked, micro_batches)

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (
            torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), reduction="sum")
            / rows.numel()
        )

    schedule = _schedules.get((id(peft), micro_batches))
    if schedule is None:
        part = PipelineStage(Part(peft, stage), stage.number, stage.count, torch.device("cpu"))
        schedule = _schedules[id(peft), micro_batches] = Schedule1F1B(part, micro_batches, loss_fn=loss_of, scale_grads=False)
    if stage.is_first:
        schedule.step(rows)
    elif stage.is_last:
        schedule.step(target=rows, losses=[])
    else:
        schedule.step()
    peft.zero_grad(set_to_none=True)


_schedules: dict[tuple[int, int], Any] = {}

if __name__ == "__main__":
    main()
