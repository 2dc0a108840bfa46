"""`[model]`, `[method]` and `[train]`: what is trained and how. Together with the data they are the law of a run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from homelab.controller.base.models import ConfigModel
from homelab.shared.law.usable import ENDS
from homelab.shared.protocol import quantisation

MethodKind = Literal["qlora", "lora", "full"]
Base = Literal["auto", "8bit"]
Precision = Literal["auto", "bf16", "fp16", "fp32"]


class Model(ConfigModel):
    """The base model: a hub id (`org/name`), or a folder that is on every node (absolute or ~/)."""

    name: str = Field(min_length=1)
    revision: str | None = None

    @field_validator("name")
    @classmethod
    def _no_relative_folder(cls, name: str) -> str:
        if name.startswith(("./", "../")) or (name.count("/") > 1 and not name.startswith(("/", "~/"))):
            raise ValueError("a hub id like org/name, or a folder on every node that starts with / or ~/")
        return name

    @property
    def is_folder(self) -> bool:
        """True for a path on the nodes, False for a hub id."""
        return self.name.startswith(("/", "~/"))


class Method(ConfigModel):
    """What is trainable: NF4 base with adapters (qlora), 16-bit or 32-bit base with adapters (lora), or everything (full).

    `base`: lora's frozen weights are held in the training precision ("auto"), or in 8 bits. `model_dropout` keeps the dropout that the model's own
    config.json has; `dropout` is that of the adapters.
    """

    kind: MethodKind
    base: Base = "auto"
    rank: int = Field(default=16, ge=1, le=1024)
    alpha: float = Field(default=32, gt=0)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    model_dropout: bool = False
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    backend: Literal["auto", "transformers", "unsloth"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("targets"), list):
            data = {**data, "targets": tuple(data["targets"])}
        return data

    @property
    def quantisation(self) -> str | None:
        """How the frozen weights are held: `quantisation.NF4`, `INT8`, or None (in the training precision)."""
        return quantisation.of(self.kind, self.base)

    @model_validator(mode="after")
    def _only_lora_has_a_choice_of_base(self) -> Method:
        if self.base == "8bit" and self.kind != "lora":
            has = "holds its base in 4 bits" if self.kind == "qlora" else "trains its weights in 32 bits"
            raise ValueError(f'`base` = "8bit" is for `kind` = "lora": "{self.kind}" {has}; set `kind` = "lora", or leave `base` out')
        if self.base == "8bit" and self.backend == "unsloth":
            raise ValueError(
                '`base` = "8bit" goes without Unsloth, whose 8-bit layers compute a row by the rows beside it: `backend` = "transformers", or `kind` = "qlora"'
            )
        return self

    @model_validator(mode="after")
    def _unsloth_trains_adapters(self) -> Method:
        if self.backend == "unsloth" and self.kind == "full":
            raise ValueError('`backend` = "unsloth" trains adapters: `kind` = "lora" or "qlora", or leave `backend` out')
        ends = [target for target in self.targets if target.rsplit(".", 1)[-1] in ENDS] if isinstance(self.targets, tuple) else []
        if self.backend == "unsloth" and ends:
            raise ValueError(
                f'`backend` = "unsloth" trains {", ".join(ends)} whole, which no merge puts into the base: `backend` = "transformers", or leave it out of `targets`'
            )
        return self


class Train(ConfigModel):
    """The optimisation. `global_batch` is samples per optimizer step over the whole cluster, `seq_len` tokens per sample at most.

    `fused_loss` never builds all logits at once: the same loss in less memory and time ("auto": for every model whose loss is of the
    usual kind). `lr_scale` scales `learning_rate` by
    global_batch / reference_batch, or its square root. `global_batch_max` allows a launch over a slow wire to raise `global_batch`.
    `keep_best`: the model has the weights with the lowest held-out loss instead of the last ones; `early_stopping`: the training ends when so many
    evaluations in a row brought no lower one (0: never).
    """

    global_batch: int = Field(ge=1, le=1_000_000)
    epochs: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    learning_rate: float = Field(gt=0, le=10)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    seq_len: int = Field(default=1024, ge=8, le=1_048_576)
    seed: int = Field(default=42, ge=0, le=2**32 - 1)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    precision: Precision = "auto"
    gradient_checkpointing: bool = True
    fused_loss: Literal["auto"] | bool = "auto"
    lr_scale: Literal["none", "linear", "sqrt"] = "none"
    reference_batch: int | None = Field(default=None, ge=1)
    global_batch_max: int | None = Field(default=None, ge=1, le=1_000_000)
    keep_best: bool = False
    early_stopping: int = Field(default=0, ge=0)

    @property
    def chooses_by_evaluation(self) -> bool:
        """Whether the held-out losses decide about the training; then how often they are measured is part of the law."""
        return self.keep_best or self.early_stopping > 0

    @model_validator(mode="after")
    def _scale_needs_a_reference(self) -> Train:
        if self.lr_scale != "none" and self.reference_batch is None:
            raise ValueError("`lr_scale` needs `reference_batch`: the global batch that `learning_rate` was chosen for")
        if self.lr_scale == "none" and self.reference_batch is not None:
            raise ValueError('`reference_batch` does nothing without `lr_scale` = "linear" or "sqrt"')
        if self.global_batch_max is not None and self.global_batch_max < self.global_batch:
            raise ValueError("`global_batch_max` is the most that `global_batch` may be raised to: not less than it")
        return self

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("exactly one of `epochs` and `steps` says how long to train")
        return self
