"""The resolved recipe as run.json has it, each section once and typed. Keys with a default may be missing: they joined later."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from homelab.shared.law import order
from homelab.shared.law.wire_bytes import BUCKET_MB
from homelab.shared.protocol import quantisation
from homelab.worker.errors import WorkerError

Section = TypeVar("Section")


@dataclass(frozen=True)
class Model:
    name: str
    revision: str | None = None


@dataclass(frozen=True)
class Data:
    train: Any  # as the recipe spells it: a path, or a data set of the hub
    eval: Any = None
    split: str = "train"


@dataclass(frozen=True)
class Method:
    kind: str  # full, lora or qlora
    rank: int = 0
    alpha: float = 0.0
    dropout: float = 0.0
    targets: str | list[str] = "all-linear"
    backend: str = "auto"
    base: str = "auto"  # of lora: in the training precision, or 8bit
    model_dropout: bool = False  # of the model's own config.json

    @property
    def quantisation(self) -> str | None:
        """How the frozen weights are held (`homelab.shared.protocol.quantisation`)."""
        return quantisation.of(self.kind, self.base)


@dataclass(frozen=True)
class Train:
    global_batch: int
    seq_len: int
    seed: int
    learning_rate: float
    warmup_steps: int
    schedule: str
    optimizer: str
    weight_decay: float
    max_grad_norm: float
    gradient_checkpointing: bool
    epochs: int | None = None
    steps: int | None = None
    fused_loss: bool | str = False
    lr_scale: str = "none"
    reference_batch: int | None = None
    keep_best: bool = False
    early_stopping: int = 0

    def total_steps(self, rows: int) -> int:
        """Optimizer steps of the whole run: `steps`, or `epochs` times the steps of one."""
        if self.steps:
            return self.steps
        assert self.epochs is not None, "a recipe has steps or epochs"
        return self.epochs * order.steps_per_epoch(rows, self.global_batch)


@dataclass(frozen=True)
class Parallel:
    micro_batch: Any = "auto"  # or a number of rows
    compress: str = "none"
    bucket_mb: Any = "auto"  # or a number

    @property
    def bucket_size_mb(self) -> float:
        """Of DDP's buckets."""
        return BUCKET_MB if self.bucket_mb == "auto" else float(self.bucket_mb)


@dataclass(frozen=True)
class Checkpoint:
    keep: int
    every_steps: int | None = None


@dataclass(frozen=True)
class Tracking:
    tensorboard: bool = False
    eval_every_steps: int = 0


def section(kind: type[Section], recipe: Mapping[str, Any], where: str = "run.json") -> Section:
    """The section of a recipe that is named like `kind`, without keys that a worker does not use.

    Raises WorkerError where the section or one of its keys is missing.
    """
    name = kind.__name__.lower()
    hint = "stop the run and launch it again: the file is written by `homelab launch`"
    values = recipe.get(name)
    if not isinstance(values, dict):
        raise WorkerError(f"the recipe has no [{name}]", where=where, hint=hint)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    missing = [field.name for field in fields if field.default is dataclasses.MISSING and field.name not in values]
    if missing:
        raise WorkerError(f"[{name}] of the recipe lacks {', '.join(missing)}", where=where, hint=hint)
    return kind(**{field.name: values[field.name] for field in fields if field.name in values})
