"""A strategy whose ranks hold parts of the model: what the shards and the pipeline refuse alike."""

from __future__ import annotations

from abc import abstractmethod

from homelab.controller.base.errors import InputError
from homelab.controller.planning.strategy.base import Strategy
from homelab.controller.planning.work.job import Job, TrainingJob

Fault = tuple[str, str]
"""What the strategy says of a recipe, as the end of a sentence that begins with its name, and the edit."""

_WHERE = "recipe, [parallel] strategy"


class Divided(Strategy):
    """No rank holds the whole model. Every node saves all of it, so that any strategy continues from it."""

    checkpoint_layout = "replicated"
    divides_weights = True

    @abstractmethod
    def fault(self, job: TrainingJob) -> Fault | None:
        """What this strategy alone refuses in a job of several ranks."""

    def trainable(self, job: Job) -> TrainingJob:
        """The job. Raises InputError for a [script], and for a recipe whose curve would be another one or that cannot be trained so."""
        if not isinstance(job, TrainingJob):
            message = f'strategy = "{self.name}" divides the model, and a [script] brings its own way to train'
            raise InputError(message, where=_WHERE, hint='strategy = "auto"')
        fault = (_of_every_rank(job) or self.fault(job)) if job.machines.world_size > 1 else None
        if fault is not None:
            raise InputError(f'strategy = "{self.name}" {fault[0]}', where=_WHERE, hint=fault[1])
        return job


def _of_every_rank(job: TrainingJob) -> Fault | None:
    """What needs the whole model on every rank."""
    recipe = job.recipe
    if recipe.method.backend == "unsloth":
        return "divides a model of transformers, and Unsloth's cannot be divided", '[method] backend = "transformers", or strategy = "ddp"'
    if recipe.parallel.compress != "none":
        return f'compresses nothing: compress = "{recipe.parallel.compress}" is a key of ddp', 'compress = "none", or strategy = "ddp"'
    if recipe.parallel.bucket_mb != "auto":
        return "has no buckets: bucket_mb is a key of ddp", 'leave bucket_mb out, or strategy = "ddp"'
    return None
