"""`[model]`, `[method]` and `[train]`: what is trained and how. Together with the data they are the law of a run. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from homelab.shared.law import order
from homelab.shared.law.usable import ENDS
from homelab.shared.markers import Above, AtLeast, AtMost, Below, Holds, Shortest
from homelab.shared.protocol import quantisation

MethodKind = Literal["qlora", "lora", "full"]
Base = Literal["auto", "8bit"]
Precision = Literal["auto", "bf16", "fp16", "fp32"]


def _no_relative_folder(name: str) -> str:
    if name.startswith(("./", "../")) or (name.count("/") > 1 and not name.startswith(("/", "~/"))):
        raise ValueError("a hub id like org/name, or a folder on every node that starts with / or ~/")
    return name


@dataclass(frozen=True)
class Model:
    """The base model: a hub id (`org/name`), or a folder that is on every node. `adapter`: a folder with the adapter to begin with, relative to the recipe, or a
    run whose model was fetched."""

    name: Annotated[str, Shortest(1), Holds(_no_relative_folder)]
    revision: str | None = None
    adapter: Annotated[str | None, Shortest(1)] = None

    @property
    def is_folder(self) -> bool:
        """True for a path on the nodes, False for a hub id."""
        return self.name.startswith(("/", "~/"))


@dataclass(frozen=True)
class Method:
    """What is trainable: NF4 base with adapters (qlora), 16-bit or 32-bit base with adapters (lora), or everything (full)."""

    kind: MethodKind
    base: Base = "auto"
    rank: Annotated[int, AtLeast(1), AtMost(1024)] = 16
    alpha: Annotated[float, Above(0)] = 32
    dropout: Annotated[float, AtLeast(0), Below(1)] = 0.0
    model_dropout: bool = False
    targets: Literal["all-linear", "all-linear+experts"] | tuple[str, ...] = "all-linear"
    backend: Literal["auto", "transformers", "unsloth"] = "auto"

    @property
    def quantisation(self) -> str | None:
        """How the frozen weights are held: `quantisation.NF4`, `INT8`, or None (in the training precision)."""
        return quantisation.of(self.kind, self.base)

    @property
    def draws(self) -> bool:
        """Whether the recipe lets a pass draw random numbers."""
        return self.model_dropout or (self.kind != "full" and self.dropout > 0)

    def __post_init__(self) -> None:
        if self.base == "8bit" and self.kind != "lora":
            has = "holds its base in 4 bits" if self.kind == "qlora" else "trains its weights in 32 bits"
            raise ValueError(f'`base` = "8bit" is for `kind` = "lora": "{self.kind}" {has}; set `kind` = "lora", or leave `base` out')
        if self.base == "8bit" and self.backend == "unsloth":
            raise ValueError(
                '`base` = "8bit" does not work with Unsloth, whose 8-bit layers compute a row depending on the other rows: `backend` = "transformers", or `kind` = "qlora"'
            )
        if self.backend == "unsloth" and self.kind == "full":
            raise ValueError('`backend` = "unsloth" trains adapters: `kind` = "lora" or "qlora", or leave `backend` out')
        if self.backend == "unsloth" and self.targets == "all-linear+experts":
            raise ValueError(
                '`targets` = "all-linear+experts" is not for Unsloth, which trains no adapters on routed experts: `backend` = "transformers"'
            )
        ends = [target for target in self.targets if target.rsplit(".", 1)[-1] in ENDS] if isinstance(self.targets, tuple) else []
        if self.backend == "unsloth" and ends:
            raise ValueError(
                f'`backend` = "unsloth" trains {", ".join(ends)} whole, which no merge puts into the base: `backend` = "transformers", or leave it out of `targets`'
            )


@dataclass(frozen=True)
class Train:
    """The optimisation."""

    global_batch: Annotated[int, AtLeast(1), AtMost(1_000_000)]
    learning_rate: Annotated[float, Above(0), AtMost(10)]
    epochs: Annotated[int | None, AtLeast(1)] = None
    steps: Annotated[int | None, AtLeast(1)] = None
    warmup_steps: Annotated[int, AtLeast(0)] = 0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    seq_len: Annotated[int, AtLeast(8), AtMost(1_048_576)] = 1024
    seed: Annotated[int, AtLeast(0), AtMost(2**32 - 1)] = 42
    weight_decay: Annotated[float, AtLeast(0)] = 0.0
    max_grad_norm: Annotated[float, Above(0)] = 1.0
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    precision: Precision = "auto"
    gradient_checkpointing: bool = True
    fused_loss: Literal["auto"] | bool = "auto"
    lr_scale: Literal["none", "linear", "sqrt"] = "none"
    reference_batch: Annotated[int | None, AtLeast(1)] = None
    global_batch_max: Annotated[int | None, AtLeast(1), AtMost(1_000_000)] = None
    keep_best: bool = False
    early_stopping: Annotated[int, AtLeast(0)] = 0

    @property
    def chooses_by_evaluation(self) -> bool:
        """Whether the held-out losses decide about the training; then how often they are measured is part of the law."""
        return self.keep_best or self.early_stopping > 0

    def total_steps(self, rows: int) -> int:
        """Optimizer steps of the whole run: `steps`, or `epochs` times the steps of one."""
        if self.steps:
            return self.steps
        assert self.epochs is not None, "a recipe has steps or epochs"
        return self.epochs * order.steps_per_epoch(rows, self.global_batch)

    def __post_init__(self) -> None:
        if self.lr_scale != "none" and self.reference_batch is None:
            raise ValueError("`lr_scale` needs `reference_batch`: the global batch that `learning_rate` was chosen for")
        if self.lr_scale == "none" and self.reference_batch is not None:
            raise ValueError('`reference_batch` does nothing without `lr_scale` = "linear" or "sqrt"')
        if self.global_batch_max is not None and self.global_batch_max < self.global_batch:
            raise ValueError("`global_batch_max` is the most that `global_batch` may be raised to: not less than it")
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("exactly one of `epochs` and `steps` says how long to train")
