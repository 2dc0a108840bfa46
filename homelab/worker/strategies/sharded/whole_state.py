"""Whole tensors from the shards of all ranks, and a rank's shards of whole tensors.

A checkpoint holds whole tensors: any strategy on any number of ranks goes on from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from homelab.worker.checkpoints import optimizer_state


def gathered(tree: Any, *, is_kept: bool) -> Any:
    """The same content with whole tensors in host memory instead of shards. Collective: tensor after tensor, in the order of the tree.

    Where it is not kept, a whole tensor goes as soon as it has come, and the content is of no use.
    """

    def whole(shard: DTensor) -> torch.Tensor:
        tensor = shard.detach().full_tensor()
        return tensor.cpu() if is_kept else tensor.new_empty(0)

    return tree_map_only(DTensor, whole, tree)


def own_part(whole: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's shard of `whole`, placed as `like` is. Nothing is sent: every rank has the whole."""
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def load_optimizer(optimizer: Any, path: Path) -> None:
    """Read the whole state that a checkpoint holds, and keep this rank's shards of it."""
    state = optimizer_state.read(optimizer, path, is_mapped=True)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        parameter = parameters[index]
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                is_sharded = isinstance(parameter, DTensor) and value.shape == parameter.shape and value.dim() > 0
                values[name] = own_part(value, parameter) if is_sharded else value.clone()
    optimizer.load_state_dict(state)
