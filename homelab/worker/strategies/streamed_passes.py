"""The passes of a rank that has a whole model, some of whose layers lie on the host: group by group, each through one layer after the other."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from homelab.worker.data.batches import Batch
from homelab.worker.model import host_layers, layer_seeds
from homelab.worker.model.layer_major import LayerMajor
from homelab.worker.strategies.pipeline.stage_model import decoder_of


def run(trainer: Any, model: Any, item: Any, count: torch.Tensor, group: int) -> float:
    """All passes of a step, in groups of so many micro-batches; the summed loss. Gradients are added up and not exchanged."""
    host = host_layers.of(model)
    assert host is not None, "the plan streams layers, and the model was read with all of them on the device"
    model.train()
    decoder = decoder_of(getattr(model, "module", model))
    passes = LayerMajor(
        decoder, range(len(decoder.layers)), host, trainer.accelerator.autocast, layer_seeds.begin, trainer.hooks.after_pass
    )

    def loss_of(batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = trainer.compute_loss(model, batch, num_items_in_batch=count)
        return loss

    seconds: list[float] = []
    summed = torch.zeros((), dtype=torch.float64, device=trainer.args.device)
    work = zip(item.micro_batches, item.seeds, strict=True)
    while some := list(itertools.islice(work, group)):
        began_s = time.perf_counter()
        batches = [trainer._prepare_inputs(batch) for batch, _ in some]
        losses = passes.train(batches, [seed for _, seed in some], loss_of, trainer.accelerator.backward)
        for loss in losses:
            summed += loss
        if trainer.clock.cuda:
            torch.cuda.current_stream(trainer.args.device).synchronize()
        seconds += _divided(time.perf_counter() - began_s, batches)
    trainer.clock.count_passes(seconds, 0.0)
    return float(summed)


def _divided(seconds: float, batches: list[Batch]) -> list[float]:
    """The time of a group by the tokens of its micro-batches: they go through each layer together."""
    tokens = [batch["input_ids"].numel() for batch in batches]
    return [seconds * own / sum(tokens) for own in tokens]
