"""The strategies "zero2", "zero3" (also called "fsdp") and "hsdp": weights, gradients and optimizer are divided over the ranks.

    zero2   what is trained is gathered once per step, and its gradient summed once: any number of passes per rank
    zero3   every weight is gathered for every pass, block by block: each rank makes as many passes as the one with most, the rest of
            them over a row without a loss
    hsdp    zero3 over the cards of each machine; between machines gradients are summed once per step

Torch's `fully_shard` does it, called here and not through accelerate, which wraps a model on CPUs in DDP instead without a word
(accelerate/state.py). What the ranks start from is compared while each still has all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from homelab.worker.checkpoints import optimizer_state, weights
from homelab.worker.model.pretrained import DTYPES, LoadedPart
from homelab.worker.runtime import process_group
from homelab.worker.runtime.step_timer import StepTimer
from homelab.worker.runtime.task import Task
from homelab.worker.strategies import gradient_norm, replica_check
from homelab.worker.strategies.base import Strategy
from homelab.worker.strategies.sharded import exchange, groups


class Shards(Strategy):
    """A model divided over the ranks, in one of the three ways."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._is_per_step = task.strategy == "zero2"
        self.exchange = exchange.Exchange()
        self._collect = process_group.gather  # timed, once there is a timer
        self._mesh: DeviceMesh | None = None
        self._difference: str | None = None

    @property
    def sent_bytes(self) -> int:
        return self.exchange.step_bytes

    @property
    def places_model(self) -> bool:
        """accelerate leaves the model as it is (transformers/trainer.py, is_distributed_loading_by_transformers)."""
        return self._task.world_size > 1

    @property
    def part(self) -> LoadedPart:
        return LoadedPart(is_gathered=self.places_model and not self._is_per_step)

    def divides_on_host(self, model: Any) -> bool:
        """A model that is larger than a card: each card gets its part alone, block by block (torch 2.13, _fsdp_init.py, _move_states_to_device).
        Quantised weights are not divided, and lie on the card already."""
        return self.part.is_gathered and all(weight.is_floating_point() for weight in model.parameters())

    def before_wrap(self, model: Any) -> None:
        task = self._task
        if not self.places_model:
            return
        self._difference = replica_check.refuse_unequal(model, task, f"step {task.resume_step}, seen on node {task.node}")
        mesh = self._mesh_of_ranks()
        self._mesh = mesh
        shard_group = mesh.get_group(mesh.ndim - 1)
        exchange.check(task, shard_group, torch.device(task.device))
        if self._is_per_step:
            groups.shard_per_step(model, mesh, DTYPES[task.precision], self.exchange)
        else:
            groups.shard_per_pass(model, mesh, self.exchange)

    def _mesh_of_ranks(self) -> DeviceMesh:
        """All ranks in a row; with hsdp [machines, ranks of each]."""
        task = self._task
        if task.strategy != "hsdp":
            return init_device_mesh(task.device, (task.world_size,))
        per_node = task.world_size // len(set(task.nodes))
        mesh = init_device_mesh(task.device, (task.world_size // per_node, per_node), mesh_dim_names=("machines", "cards"))
        for group in mesh.get_all_groups():  # torch gives them its own limit, 10 minutes with NCCL, and not that of the default group
            dist.distributed_c10d._set_pg_timeout(process_group.patience(), group)
        return mesh

    def reduce_gradients(self, wrapped: Any, timer: StepTimer) -> None:
        self.exchange.timer, self._collect = timer, timer.gather

    def begin_step(self, wrapped: Any, passes: int) -> int:
        self.exchange.begin()
        return self._gather(wrapped, passes)

    def _gather(self, wrapped: Any, passes: int) -> int:
        """Gather what stays for all passes; the number of passes that this rank must make."""
        if not self.places_model:
            return passes
        if not self._is_per_step:
            return int(max(values[0] for values in self._collect([float(passes)])))
        for group in groups.groups(wrapped):
            group.unshard()
        return passes

    def without_reduction(self, accelerator: Any, wrapped: Any) -> AbstractContextManager[Any]:
        return self._kept(wrapped) if self.places_model else contextlib.nullcontext()

    @contextlib.contextmanager
    def _kept(self, wrapped: Any) -> Iterator[None]:
        """Around a pass that is not the last one of a step: zero2 keeps its gradient to itself, hsdp within the machine."""
        if self._task.strategy == "hsdp":
            wrapped.set_requires_all_reduce(False)
            yield
            wrapped.set_requires_all_reduce(True)
        elif self._is_per_step:
            wrapped.set_requires_gradient_sync(False)
            wrapped.set_reshard_after_backward(False)
            yield
            wrapped.set_requires_gradient_sync(True)
            wrapped.set_reshard_after_backward(True)
        else:
            yield

    @contextlib.contextmanager
    def evaluating(self, model: Any, passes: int) -> Iterator[int]:
        yield self._gather(model, passes)
        self._forget_passes(model)

    def _forget_passes(self, model: Any) -> None:
        """After passes without gradients: give up the gathered weights, and the order of the passes, by which torch would gather ahead in the
        next backward pass: on one rank more often than on another (_fsdp_param_group.py, _backward_prefetch)."""
        if self.places_model:
            model.reset_iter_state()

    def clip(self, model: Any, most: float) -> float:
        if not self.places_model:
            return super().clip(model, most)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert self._mesh is not None and all(isinstance(gradient, DTensor) for gradient in gradients)
        copies = self._mesh.size(0) if self._mesh.ndim > 1 else 1  # each shard is on so many ranks
        own = [gradient.to_local() for gradient in gradients]
        norm: float = gradient_norm.clip(own, most, lambda square: sum(values[0] for values in self._collect([square])) / copies)
        return norm

    @property
    def saves_alone(self) -> bool:
        return self._task.world_size == 1

    def state(self, trainer: Any) -> dict[str, Any]:
        is_kept = self._task.is_keeper
        own = {weights.WEIGHTS: weights.trained(trainer.model), weights.OPTIMIZER: trainer.optimizer.state_dict()}
        whole: dict[str, Any] = gathered(own, is_kept=is_kept)
        return whole if is_kept else {}

    def whole_weights(self, model: Any, part: Callable[[Any], dict[str, Any]] = weights.trained) -> dict[str, torch.Tensor]:
        whole: dict[str, torch.Tensor] = gathered(part(model), is_kept=self._task.is_keeper)
        return whole

    def load_optimizer(self, optimizer: Any, checkpoint: Path, device: Any) -> None:
        load_optimizer(optimizer, checkpoint / weights.OPTIMIZER)

    def check_start(self, model: Any, where: str) -> str | None:
        self._forget_passes(model)  # of the small tests of the loaded model
        return self._difference


def make(task: Task, steps: int) -> Strategy:
    """The strategy of a task; a divided model needs no number of steps."""
    return Shards(task)


def gathered(tree: Any, *, is_kept: bool) -> Any:
    """The same content with whole tensors in host memory instead of shards. Collective: tensor after tensor, in the order of the tree.

    A checkpoint holds whole tensors: any strategy on any number of ranks goes on from it. Where it is not kept, a whole tensor goes as soon as it has
    come, and the content is of no use.
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
