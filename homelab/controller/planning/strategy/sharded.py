"""Training with what is trained, or the whole model, divided over the ranks (`homelab.worker.strategies.sharded.shards`). The curve is that of ddp."""

from __future__ import annotations

import dataclasses
import re

from homelab.controller.base.errors import InputError
from homelab.controller.base.units import gigabytes
from homelab.controller.planning.machines import machines
from homelab.controller.planning.memory import division, rank_memory
from homelab.controller.planning.memory.activations import width
from homelab.controller.planning.model.model_config import own_dtype
from homelab.controller.planning.strategy import ranks
from homelab.controller.planning.strategy.base import Assignment, Automatic
from homelab.controller.planning.strategy.divided import Divided, Fault
from homelab.controller.planning.time import network_cost
from homelab.controller.planning.types import Choice
from homelab.controller.planning.work.job import Job, TrainingJob

#: torch 2.11 has no `FSDPModule.reset_iter_state`, by which the ranks stay in step after an evaluation.
_LEAST_TORCH = (2, 13)
_STORED = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_CHECKPOINTS = "every node saves all of it, so any strategy can continue from it, and a dead node costs nothing"


class Sharded(Divided):
    """What the three ways have in common."""

    def assign(self, job: Job) -> Assignment:
        """The shares of the batch. Raises InputError for a recipe whose curve would be another one, DoesNotFit where no rank has room."""
        job = self.trainable(job)
        if self.name != "zero2":
            _refuse_host_load(job, self.name)
        nodes = [slot.node.name for slot in job.machines.slots]
        assignment = ranks.whole_models(dataclasses.replace(job, division=division.of(self.name, nodes)))
        saved = Choice(subject="checkpoints", value="whole", because=_CHECKPOINTS)
        return dataclasses.replace(assignment, choices=(*assignment.choices, saved))

    def fault(self, job: TrainingJob) -> Fault | None:
        """An older torch, and an optimizer whose blocks the shards would cut."""
        for name, facts in job.machines.facts.items():
            version = facts.python.packages.get("torch") or ""
            release = re.match(r"(\d{1,4})\.(\d{1,4})", version)
            if name in job.machines.names and release and (int(release[1]), int(release[2])) < _LEAST_TORCH:
                is_cuda = job.machines.device == "cuda"
                renewal = "renew the NVIDIA driver there (580 or newer) and run `homelab setup`" if is_cuda else "`homelab setup`"
                return (
                    f"needs torch {_LEAST_TORCH[0]}.{_LEAST_TORCH[1]} or newer, and {name} has {version}",
                    f'{renewal}, or strategy = "ddp"',
                )
        if (optimizer := job.recipe.train.optimizer) != "adamw":
            blocks = f'would change the training with optimizer = "{optimizer}": it rounds in blocks of 256 weights, and shards cut them elsewhere'
            return blocks, '[train] optimizer = "adamw" (it changes the training, too), or strategy = "ddp"'
        return None

    def wire_s(self, size_bytes: float, ranks: int, bytes_per_s: float) -> float:
        """Gathers and scatters, each of which passes (W - 1) / W of its bytes through every link."""
        return network_cost.gather_s(size_bytes, ranks, bytes_per_s)

    def because(self, job: Job) -> str:
        if not isinstance(job, TrainingJob) or job.shape is None:
            return "the recipe says so; the model's size is not known here"
        count = job.machines.world_size
        if count == 1:
            return "one rank alone: nothing is divided"
        memory = f"each of {count} ranks holds its part"
        if len(job.machines.nodes) == 1:
            return f"{memory}; nothing goes over the LAN"
        wire = network_cost.wire_between(job.machines.names, job.throughputs)
        return f"{memory}; {self._transfer_text(job, count, wire)}"

    def _transfer_text(self, job: TrainingJob, count: int, wire: network_cost.Wire) -> str:
        size_bytes = self.step_bytes(job, 1) or 0
        unit = "pass" if self.is_per_pass else "step"
        return f"{network_cost.bytes_text(size_bytes)} per {unit} at {wire}: {network_cost.seconds_text(self.wire_s(size_bytes, count, wire.bytes_per_s))}"


class Zero2(Sharded):
    """What is trained is gathered once per step, and its gradient scattered once."""

    name = "zero2"

    def automatic(self, job: Job) -> Automatic:
        return "fallback" if job.machines.world_size > 1 else "never"

    def step_bytes(self, job: TrainingJob, passes: int) -> int | None:
        """Linear layers in the training precision, norms and embeddings in fp32; then the gradient in fp32."""
        if job.shape is None:
            return None
        method, trained = job.recipe.method, rank_memory.trainable_parameters(job.shape, job.recipe.method)
        linear = job.shape.linear_parameters if method.kind == "full" else trained
        return width(job.precision) * linear + 4 * (trained - linear) + 4 * trained


class Zero3(Sharded):
    """Every weight but quantised ones is gathered for every pass, forward and backward, and the gradient scattered."""

    name = "zero3"
    is_per_pass = True
    waits_in_passes = True

    def automatic(self, job: Job) -> Automatic:
        return "fallback" if len(job.machines.nodes) == 1 and job.machines.world_size > 1 else "never"

    def step_bytes(self, job: TrainingJob, passes: int) -> int | None:
        if job.shape is None:
            return None
        method, shape = job.recipe.method, job.shape
        trained = rank_memory.trainable_parameters(shape, method)
        sharded = shape.total - shape.quantised_parameters(shape.held(method))
        stored = 4 * sharded if method.kind == "full" else width(job.precision) * sharded + 4 * trained
        ends = (4 if method.kind == "full" else width(job.precision)) * (shape.embedding_parameters + shape.head_parameters)
        return passes * (2 * stored - ends + 4 * trained)  # embeddings, head and norms stay from the forward pass to the backward pass


class Fsdp(Zero3):
    """Another name of zero3."""

    name = "fsdp"

    def automatic(self, job: Job) -> Automatic:
        return "never"


class Hsdp(Zero3):
    """zero3 over the cards of each machine; between machines the gradient is summed once per step."""

    name = "hsdp"
    is_per_pass = False

    def automatic(self, job: Job) -> Automatic:
        return "never"

    def assign(self, job: Job) -> Assignment:
        """Raises InputError where machines have unequal numbers of cards, or one each."""
        counts = {node.name: job.machines.ranks_on(node) for node in job.machines.nodes}
        if len(set(counts.values())) != 1 or min(counts.values()) < 2:
            text = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise InputError(
                f'strategy = "hsdp" needs the same number of cards, two or more, in each machine: {text}',
                where="recipe, [parallel] strategy", hint='strategy = "zero2", or --nodes with machines of equal cards',
            )  # fmt: skip
        return super().assign(job)

    def step_bytes(self, job: TrainingJob, passes: int) -> int | None:
        """What goes between machines: the gradient, reduced by a ring."""
        return None if job.shape is None else network_cost.gradient_bytes(job.shape, job.recipe.method)

    def wire_s(self, size_bytes: float, ranks: int, bytes_per_s: float) -> float:
        return network_cost.all_reduce_s(size_bytes, ranks, bytes_per_s)


def _read_bytes(job: TrainingJob) -> int:
    """Bytes of a machine's own memory that one rank makes while it reads the base; 0 where the model's shape is not known, and for a quantised base,
    which goes to the card.

    Files in the training's precision are mapped: all ranks of a machine share the pages, and the kernel may drop them (measured: 3 MB beside the pages
    for a model of 269 MB). Other numbers are made while they are read, by each rank for itself: 4 bytes a weight for full training.
    """
    method = job.recipe.method
    if job.shape is None or job.shape.held(method) is not None:
        return 0
    if method.kind == "full":
        return rank_memory.TRAINED_BYTES * job.shape.total
    return 0 if own_dtype(job.machines.facts) == _STORED[job.precision] else width(job.precision) * job.shape.total


def _refuse_host_load(job: TrainingJob, name: str) -> None:
    """Raises InputError for a machine whose memory does not hold what its ranks make. `name`: of the strategy."""
    made = _read_bytes(job)
    for node in job.machines.nodes if made and job.machines.device == "cuda" else ():
        facts, count = job.machines.facts.get(node.name), job.machines.ranks_on(node)
        if facts is None:
            continue
        total, held = machines.host_memory(facts.system)
        if total is not None and count * made > total - held:
            raise InputError(
                f'strategy = "{name}" reads the model into the memory of each machine before the cards get their parts: {node.name} needs '
                f"{gigabytes(count * made)} GB for that, and {gigabytes(total - held)} GB are free",
                where=f"node {node.name}, memory", hint='free memory there; or kind = "lora" on a model in 16 bits, whose files are mapped without extra memory',
            )  # fmt: skip
