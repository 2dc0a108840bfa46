"""Data parallel training (torch's DDP): every rank holds the whole model and computes its share of the batch; gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence

from homelab.controller.base.errors import InputError
from homelab.controller.planning.memory.scenario import DoesNotFit
from homelab.controller.planning.strategy import ranks
from homelab.controller.planning.strategy.base import Assignment, Strategy
from homelab.controller.planning.strategy.pipeline import streamed_rank
from homelab.controller.planning.time import hidden_wire, network_cost
from homelab.controller.planning.time.hidden_wire import LastPass
from homelab.controller.planning.work.job import Job, TrainingJob
from homelab.shared.law.wire_bytes import BUCKET_MB


class Ddp(Strategy):
    """Every rank holds everything."""

    name = "ddp"
    checkpoint_layout = "replicated"

    def assign(self, job: Job) -> Assignment:
        """The shares of the batch. Raises InputError for settings that no rank can train with, `DoesNotFit` where no rank has room."""
        if job.recipe.parallel.compress == "powersgd" and job.precision == "fp16" and job.machines.world_size > 1:
            raise InputError(
                'compress = "powersgd" does not work with fp16: its loss scaling overflows on purpose, and PowerSGD would keep that overflow',
                where="recipe, [parallel] compress",
                hint='compress = "bf16" halves the bytes with any precision; or [train] precision = "bf16" or "fp32"',
            )
        if not isinstance(job, TrainingJob):
            return ranks.programs(job)
        streamed = streamed_rank.alone(job) if job.machines.world_size == 1 else None
        try:
            return streamed or ranks.whole_models(job)
        except DoesNotFit as error:
            if job.machines.world_size == 1:
                error.message += streamed_rank.why_hosts_do_not_help(job)
            raise

    def step_bytes(self, job: TrainingJob, passes: int) -> int | None:
        """The gradient of everything that is trained, as it is compressed."""
        return network_cost.sent_bytes(job.shape, job.recipe.method, job.recipe.parallel.compress) if job.shape else None

    def wire_s(self, size_bytes: float, ranks: int, bytes_per_s: float) -> float:
        """A ring all-reduce, once per optimizer step."""
        return network_cost.all_reduce_s(size_bytes, ranks, bytes_per_s)

    def exposed_s(self, job: TrainingJob, wire_s: float, passes: Sequence[LastPass]) -> float:
        """Buckets are reduced while the backward pass of the last pass goes on. PowerSGD's rounds wait for each other: none of it is counted as hidden."""
        recipe, shape = job.recipe, job.shape
        if shape is None or recipe.parallel.compress == "powersgd":
            return wire_s
        bucket_mb = BUCKET_MB if recipe.parallel.bucket_mb == "auto" else recipe.parallel.bucket_mb
        buckets = hidden_wire.buckets_of(shape, recipe.method, recipe.train, bucket_mb)
        exposed_s = hidden_wire.exposed_s(wire_s, buckets, hidden_wire.backward_part(shape, recipe.method, recipe.train), passes)
        return exposed_s if job.machines.device == "cuda" else wire_s - hidden_wire.HIDDEN_ON_CPU * (wire_s - exposed_s)

    def because(self, job: Job) -> str:
        """The all-reduce in bytes and seconds, and what sharding would cost."""
        count = job.machines.world_size
        if count == 1:
            return "one rank alone: nothing goes over the network"
        if len(job.machines.nodes) == 1:
            return f"{count} ranks on one machine: nothing goes over the LAN"
        if not isinstance(job, TrainingJob) or job.shape is None:
            return "the gradient's size is not known here"
        wire = network_cost.wire_between(job.machines.names, job.throughputs)
        size = network_cost.sent_bytes(job.shape, job.recipe.method, job.recipe.parallel.compress)
        return network_cost.all_reduce_text(size, count, wire) + " " + network_cost.price_of_sharding(job, job.shape)
