"""How a model is cut into groups: the weights of a group are gathered together, and their gradients summed together.

per step    only what is trained is sharded. Linear layers of a block are one group, gathered in the training precision: autocast
            casts the same numbers in the same way, with twice the bytes. Norms and embeddings, which autocast leaves in fp32, are another
per pass    everything is sharded but quantised weights, block by block, gathered as it is stored
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from homelab.worker.strategies.sharded.exchange import Exchange

REST = "the rest"  # of the model: embeddings, the last norm, the head
_AS_STORED = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)


def shard_per_step(model: Any, mesh: DeviceMesh, dtype: torch.dtype, exchange: Exchange) -> None:
    """Shard the trained weights of `model` in place; their unsharded copies stay from the first pass of a step to the last."""
    frozen = {weight for weight in model.parameters() if not weight.requires_grad}
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": False, "ignored_params": frozen}
    blocks = _blocks(model)
    for block in blocks.values():
        if dtype == torch.float32:
            if any(weight.requires_grad for weight in block.parameters()):
                fully_shard(block, mp_policy=_AS_STORED, **options)
        elif linear := [part for part in block.modules() if isinstance(part, torch.nn.Linear) and part.weight.requires_grad]:
            fully_shard(linear, mp_policy=MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False), **options)
    fully_shard(model, mp_policy=_AS_STORED, **options)
    _connect(model, list(blocks), mesh, exchange)


def shard_per_pass(model: Any, mesh: DeviceMesh, exchange: Exchange) -> None:
    """Shard the weights of `model` in place; every block is gathered when a pass comes to it, and given up after it."""
    packed = {weight for weight in model.parameters() if not weight.is_floating_point()}
    blocks = _blocks(model)
    for block in blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=_AS_STORED, reshard_after_forward=True, ignored_params=packed)
    fully_shard(model, mesh=mesh, mp_policy=_AS_STORED, reshard_after_forward=False, ignored_params=packed)
    _connect(model, list(blocks), mesh, exchange)


def groups(model: Any) -> Iterator[FSDPModule]:
    """All sharded parts of a model, the whole first."""
    return (part for part in model.modules() if isinstance(part, FSDPModule))


def _blocks(model: Any) -> dict[str, torch.nn.Module]:
    """The layers that the model's class names as those not to be split, by their path; {} where it names none: then the model is one group."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return {path: part for path, part in model.named_modules() if type(part).__name__ in names}


def _connect(model: Any, blocks: list[str], mesh: DeviceMesh, exchange: Exchange) -> None:
    """Plain sums: every rank's loss is its part of that of the whole batch already."""
    for path, part in model.named_modules():
        if not isinstance(part, FSDPModule):
            continue
        name = next((block for block in blocks if f"{path}.".startswith(f"{block}.")), REST)
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
        part.set_custom_all_gather(exchange.gather(name))
        part.set_custom_reduce_scatter(exchange.scatter(name))
        for group in part._get_fsdp_state()._fsdp_param_groups:
            group.post_backward = exchange.told(group.post_backward)
