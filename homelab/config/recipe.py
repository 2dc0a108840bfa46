"""A recipe: what is trained and how. Nothing in `[train]` names a node; which node computes what belongs to the plan."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from homelab.config.cluster import Strict
from homelab.config.environment import RecipeEnvironment, refusal_of_the_law

MethodKind = Literal["qlora", "lora", "full"]
Precision = Literal["auto", "bf16", "fp16", "fp32"]


class Model(Strict):
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


@dataclass(frozen=True)
class HubData:
    """A data set of the hub: its id, a configuration (None: it has one alone), a split, and a commit, tag or branch (None: the newest)."""

    path: str
    config: str | None
    split: str
    revision: str | None

    @property
    def identity(self) -> str:
        """Tells what is loaded from anything else; where `revision` is a commit, from every other content too."""
        return f"{self.path}:{self.config or ''}:{self.split}@{self.revision or ''}"


class Data(Strict):
    """Where the samples come from: a path relative to the recipe (shipped to the nodes), a path on every node, or hub:org/name.

    Of data from the hub, `config` names one of several configurations, `split` what is trained on, `eval_split` what is evaluated on, and
    `revision` a commit, tag or branch (left out: the newest at the launch, and from then on that one). `config` and `revision` hold for
    `eval` where that is the same data set; another one has its `eval_config`. `template` "none": plain prompts and completions are joined
    as they stand, and do not go into the chat template of a model that has one.
    """

    train: str = Field(min_length=1)
    eval: str | None = None
    eval_fraction: float = Field(default=0.0, ge=0.0, le=0.5)
    format: Literal["auto", "chat", "prompt-completion", "text"] = "auto"
    completion_only: bool = True
    packing: bool = False
    config: str | None = Field(default=None, min_length=1)
    revision: str | None = Field(default=None, min_length=1)
    split: str = Field(default="train", min_length=1)
    eval_config: str | None = Field(default=None, min_length=1)
    eval_revision: str | None = Field(default=None, min_length=1)
    eval_split: str = Field(default="validation", min_length=1)
    text_column: str = "text"
    template: Literal["auto", "none"] = "auto"

    @field_validator("train", "eval")
    @classmethod
    def _names_something(cls, place: str | None) -> str | None:
        if place is not None and not place.removeprefix("hub:").strip():
            raise ValueError("a path relative to the recipe, a path on every node (/ or ~/), or hub:org/name")
        return place

    @model_validator(mode="after")
    def _hub_keys_need_the_hub(self) -> Data:
        for key in ("config", "revision", "eval_config", "eval_revision"):
            role = "eval" if key.startswith("eval_") else "train"
            if getattr(self, key) is not None and not (getattr(self, role) or "").startswith("hub:"):
                raise ValueError(f"`{key}` is for data from the hub: {role} = \"hub:org/name\"")
        return self

    @model_validator(mode="after")
    def _eval_is_not_train(self) -> Data:
        of_train, of_eval = self.hub("train"), self.hub("eval")
        if of_train is not None and of_train == of_eval:
            raise ValueError("`eval` would be the very rows that are trained on: `eval_split` names other ones, or `eval_fraction` sets some aside")
        return self

    @model_validator(mode="after")
    def _chats_need_their_template(self) -> Data:
        if self.template == "none" and self.format == "chat":
            raise ValueError('`template` = "none" is for plain prompts and completions: a chat is only text by its chat template')
        return self

    def hub(self, role: str) -> HubData | None:
        """What `role` ("train" or "eval") names on the hub; None for a file, and where there is no such data."""
        place = self.train if role == "train" else self.eval
        if place is None or not place.startswith("hub:"):
            return None
        same = place == self.train
        if role == "train":
            return HubData(place.removeprefix("hub:"), self.config, self.split, self.revision)
        of_train = (self.config, self.revision) if same else (None, None)
        return HubData(place.removeprefix("hub:"), self.eval_config or of_train[0], self.eval_split, self.eval_revision or of_train[1])


class Method(Strict):
    """What is trainable: NF4 base with adapters (qlora), 16-bit or 32-bit base with adapters (lora), or everything (full)."""

    kind: MethodKind
    rank: int = Field(default=16, ge=1, le=1024)
    alpha: float = Field(default=32, gt=0)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    backend: Literal["auto", "transformers", "unsloth"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("targets"), list):
            data = {**data, "targets": tuple(data["targets"])}
        return data

    @model_validator(mode="after")
    def _unsloth_trains_adapters(self) -> Method:
        if self.backend == "unsloth" and self.kind == "full":
            raise ValueError('`backend` = "unsloth" trains adapters: `kind` = "lora" or "qlora", or leave `backend` out')
        return self


class Train(Strict):
    """The optimisation. `global_batch` is samples per optimizer step over the whole cluster, `seq_len` tokens per sample at most.

    `fused_loss` never builds all logits at once: the same loss in less memory and time ("auto": for every model whose loss is of the
    usual kind). `lr_scale` scales `learning_rate` by
    global_batch / reference_batch, or its square root. `global_batch_max` allows a launch over a slow wire to raise `global_batch`.
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


class Parallel(Strict):
    """How the work is spread. None of it changes the training, but `compress`, which rounds gradients on the wire; the plan says so."""

    strategy: Literal["auto", "ddp", "fsdp", "zero2", "zero3"] = "auto"
    shares: Literal["auto", "equal"] | dict[str, int] = "auto"
    micro_batch: Literal["auto"] | int = "auto"
    compress: Literal["none", "bf16", "powersgd"] = "none"
    port: int = Field(default=29500, ge=1024, le=65535)

    @field_validator("shares")
    @classmethod
    def _shares_positive(cls, shares: Any) -> Any:
        if isinstance(shares, dict) and (min(shares.values(), default=-1) < 0 or not any(shares.values())):
            raise ValueError("samples per global batch for every node, 0 or more each and not 0 for all, e.g. { tower = 6, laptop = 4 }")
        return shares

    @field_validator("micro_batch")
    @classmethod
    def _micro_batch_positive(cls, micro_batch: Any) -> Any:
        if isinstance(micro_batch, int) and micro_batch < 1:
            raise ValueError('rows per forward pass, 1 or more, or "auto"')
        return micro_batch


class Checkpoint(Strict):
    """A complete checkpoint on every node each `every_steps` optimizer steps; the last `keep` stay.

    `every_steps` left out: as often as pays, from what a save is measured to cost. Saving takes at most 3.5 % of the time, and a
    fault loses at most two minutes of work (`homelab.worker.interval`).
    """

    every_steps: int | None = Field(default=None, ge=1)
    keep: int = Field(default=3, ge=1, le=1_000_000)


class LogPolicy(Strict):
    """What a line in a node's log means to the owner: leave that node out of the next attempt, or stop trying."""

    pattern: str = Field(min_length=1)
    action: Literal["exclude", "stop"]

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"a regular expression (Python's re): {error}") from error
        return pattern


# Lines after which a machine needs its owner: a card that is off the bus until the next boot (NVIDIA's Xid catalogue: 48, 79 and 95),
# and a disk that fails.
_LOG_POLICIES = (
    LogPolicy(pattern=r"GPU is lost|fallen off the bus|[Uu]ncorrectable ECC|\bXid\b.*: (?:48|79|95)\b", action="exclude"),
    LogPolicy(pattern=r"\[Errno (?:5|30)\]|Input/output error|Read-only file system", action="exclude"),
)


class Recovery(Strict):
    """How a run goes on after a failure: by itself or not, how often within an hour, with how few nodes, with which exceptions.

    `rejoin`: when a node that was left out is taken back once it is well again.
    """

    auto: bool = True
    max_restarts: int = Field(default=5, ge=0)
    min_nodes: int = Field(default=1, ge=1)
    rejoin: Literal["next-checkpoint", "never"] = "next-checkpoint"
    log_policies: tuple[LogPolicy, ...] = _LOG_POLICIES

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("log_policies"), list):
            data = {**data, "log_policies": tuple(data["log_policies"])}
        return data


class Tracking(Strict):
    """What is written down beside the metrics. `eval_every_steps` 0: only before the first and after the last step."""

    tensorboard: bool = True
    eval_every_steps: int = Field(default=0, ge=0)


class Script(Strict):
    """Any Python program that torchrun can start, instead of the built-in worker. The path is relative to the recipe; it is shipped.

    So are the modules beside it that it imports, and `files`: files and folders beside the script or below, relative to the recipe.
    """

    path: str = Field(min_length=1)
    args: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, data: Any) -> Any:
        if isinstance(data, dict):
            data = {key: tuple(value) if key in ("args", "files") and isinstance(value, list) else value for key, value in data.items()}
        return data


class Recipe(Strict):
    """All of a recipe file, every default filled in."""

    model: Model | None = None
    data: Data | None = None
    method: Method | None = None
    train: Train | None = None
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    recovery: Recovery = Recovery()
    tracking: Tracking = Tracking()
    environment: RecipeEnvironment = {}
    script: Script | None = None

    @model_validator(mode="after")
    def _worker_or_script(self) -> Recipe:
        built_in = {"model": self.model, "data": self.data, "method": self.method, "train": self.train}
        if self.script is None:
            missing = [name for name, section in built_in.items() if section is None]
            if missing:
                raise ValueError("missing " + ", ".join(f"[{name}]" for name in missing) + " (or give a [script])")
        elif any(section is not None for section in built_in.values()):
            raise ValueError("a [script] trains by itself: it goes without [model], [data], [method] and [train]")
        return self

    @model_validator(mode="after")
    def _the_worker_computes_what_is_written(self) -> Recipe:
        for name in self.environment if self.script is None else ():
            why = refusal_of_the_law(name)
            if why is not None:
                raise ValueError(f"[environment] {name} cannot be set here: {why}")
        return self

    def law_hash(self, data_digests: tuple[str, ...]) -> str:
        """Fingerprint (sha256, 16 hex digits) of what decides the training: model, data, method, train, and the data's digests.

        Sections that only say who computes what, or how often to save, are left out on purpose: they may change on recovery.
        """
        law = self.model_dump(mode="json", include={"model", "data", "method", "train", "script"})
        if law.get("method"):
            law["method"].pop("backend", None)
        if self.script is not None and self.environment:  # its program may read any of it
            law["environment"] = self.environment
        text = json.dumps([law, list(data_digests)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
