"""torch's own schedule as an independent witness: `Schedule1F1B` over stages that are put together by hand has the gradients of `Pipeline.step`, and
so has one process. The cut, the rows and the global count of tokens are the same."""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CUT = [5, 4, 3]
PASSES, ROWS, LENGTH = 5, 2, 24  # torch's schedule wants one shape for all micro-batches
WITHIN = 1e-6


def test_gradients_are_those_of_torchs_schedule_and_of_one_process(forks: harness.Forks, tmp_path: Path, data: Path) -> None:
    from safetensors.torch import load_file

    model = harness.tiny_llama(tmp_path / "model", hidden=32, intermediate=64, layers=sum(CUT))
    run = harness.make_run(tmp_path / "run", model, data, method__kind="lora")
    codes, output = forks.run(run, 1, [12, 0, 0], stages=CUT, entry=f"{__name__}:three_ways", timeout_s=100)
    assert codes == [0] * len(CUT), output
    ours, torchs = (
        {name: tensor for rank in range(len(CUT)) for name, tensor in load_file(run / f"{way} {rank}").items()}
        for way in ("ours", "torch's")
    )
    whole = load_file(run / "whole")
    assert len(whole) == sum(CUT) * 7 * 2 and all(gradient.norm() > 1e-6 for gradient in whole.values()), "every adapter has a gradient"
    assert harness.relative_error(ours, torchs) < WITHIN
    assert harness.relative_error(ours, whole) < WITHIN
    assert harness.relative_error(torchs, whole) < WITHIN


def three_ways() -> int:
    """A rank: its stage by `Pipeline.step` and by torch's schedule, and on the first rank the whole model. Gradients go into files."""
    import torch
    from safetensors.torch import save_file

    from homelab.worker.runtime import process_group
    from homelab.worker.runtime.task import load_task

    task = load_task(os.environ)
    process_group.connect(task)
    save_file(_ours(task), task.run_dir / f"ours {task.rank}")
    save_file(_torchs(task), task.run_dir / f"torch's {task.rank}")
    if task.rank == 0:
        whole = _whole_model(task)
        tokens, labels = _rows()
        _summed_loss(whole(input_ids=tokens).logits, labels).backward()
        save_file(_gradients(whole), task.run_dir / "whole")
    torch.distributed.barrier()
    process_group.disconnect()
    return os.EX_OK


def _ours(task: Any) -> dict[str, Any]:
    import torch

    from homelab.worker.model.build import add_adapters
    from homelab.worker.strategies.pipeline import stage_model
    from homelab.worker.strategies.pipeline.neighbours import Neighbours
    from homelab.worker.strategies.pipeline.passes import PipelinePasses

    base = stage_model.load(task.model.name, stage=task.stage, dtype=torch.float32)
    model = add_adapters(base, task.method, task.train.seed).train()
    _fill(model)
    neighbours = Neighbours.of(task.rank, task.stage_ranks)
    hidden = model.config.hidden_size
    pipeline = PipelinePasses(
        model, task.stage, neighbours, torch.float32, torch.device("cpu"), hidden, contextlib.nullcontext, lambda: None
    )
    tokens, labels = _rows()
    batches = [{"input_ids": some, "labels": of_them} for some, of_them in zip(tokens.split(ROWS), labels.split(ROWS), strict=True)]
    pipeline.step(batches, [0] * PASSES, _count(labels), lambda loss: loss.backward())
    return _gradients(model)


def _torchs(task: Any) -> dict[str, Any]:
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    whole, stage = _whole_model(task), task.stage
    own = PipelineStage(_hand_made(whole, stage), stage.number, stage.count, torch.device("cpu"))
    # scale_grads=True, the default, would divide by the number of micro-batches
    schedule = Schedule1F1B(own, PASSES, loss_fn=_summed_loss, scale_grads=False)
    tokens, labels = _rows()
    schedule.step(*([tokens] if stage.is_first else []), target=labels if stage.is_last else None)
    return _gradients(whole)


def _whole_model(task: Any) -> Any:
    from transformers import AutoModelForCausalLM

    from homelab.worker.model.build import add_adapters

    model = add_adapters(AutoModelForCausalLM.from_pretrained(task.model.name), task.method, task.train.seed).train()
    _fill(model)
    return model


def _hand_made(whole: Any, stage: Any) -> Any:
    """A stage as one writes it for torch's pipeline: the layers in a loop, with no help of this project."""
    import torch

    base = whole.get_base_model()

    class HandMade(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(base.model.layers[stage.begin : stage.end])

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            hidden = base.model.embed_tokens(given) if stage.is_first else given
            positions = torch.arange(hidden.shape[1]).unsqueeze(0)
            rotation = base.model.rotary_emb(hidden, positions)
            for layer in self.layers:
                hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotation)
            return base.lm_head(base.model.norm(hidden)) if stage.is_last else hidden

    return HandMade()


def _rows() -> tuple[Any, Any]:
    """(tokens, labels) of the global batch; each micro-batch has another number of tokens with a loss."""
    import torch

    tokens = torch.randint(3, 250, (PASSES * ROWS, LENGTH), generator=torch.Generator().manual_seed(7))
    labels = tokens.clone()
    for row in range(PASSES * ROWS):
        labels[row, : 2 * row] = -100
    return tokens, labels


def _count(labels: Any) -> Any:
    return (labels[:, 1:] != -100).sum()


def _summed_loss(logits: Any, labels: Any) -> Any:
    """Over the tokens with a loss of the whole batch, also for a part of it."""
    from torch.nn.functional import cross_entropy

    summed = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    return summed / _count(_rows()[1])


def _fill(model: Any) -> None:
    """Adapters as in the middle of a training: with B = 0, as they begin, A has no gradient."""
    import torch

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)


def _gradients(model: Any) -> dict[str, Any]:
    return {name: parameter.grad.contiguous() for name, parameter in model.named_parameters() if parameter.grad is not None}
