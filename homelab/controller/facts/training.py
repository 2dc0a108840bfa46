"""What a recipe needs on a node: the model, data files, and the speeds that earlier runs measured."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from homelab.controller.base.models import WireModel
from homelab.controller.base.sanitize import plain_lines


class ModelFile(WireModel):
    """One file of the model (`homelab.node.storage.digests`). Small files have `sha256` alone, large ones a `sampled` digest, and `sha256` where it
    was computed once. `blob` is the sha256 that the hub's cache named the file by when it was downloaded."""

    size_bytes: int
    sampled: str | None = None
    sha256: str | None = None
    blob: str | None = None


class ModelFacts(WireModel):
    """The base model as it lies on this node. `config` is its config.json; `problem` says why it cannot be used.

    `instead` is what the folder holds in the place of a model, by `protocol.model_forms`: adapters (of `base`), GGUF files, a model in another form.
    `damaged`: it is there, and downloading or copying it again is the only way. `has_token` and `hub` ("ok", "offline", or why it
    cannot be reached) are asked where a hub model is not in the cache.
    """

    found: bool
    path: str | None = None
    config: dict[str, Any] | None = None
    size_bytes: int | None = None
    problem: str | None = None
    damaged: bool = False
    instead: Literal["", "adapters", "gguf", "original", "onnx", "framework", "diffusion", "sentences"] = ""
    base: Annotated[str, Field(max_length=200), AfterValidator(plain_lines)] = ""
    files: dict[str, ModelFile] = {}
    has_chat_template: bool | None = None
    template_writes_date: bool = False
    has_token: bool | None = None
    hub: str | None = None


class FileFacts(WireModel):
    """A data file on this node."""

    path: str
    found: bool
    size_bytes: int | None = None
    sha256: str | None = None
    rows: int | None = None  # about; None where they cannot be counted without a parser
    problem: str | None = None


class SpeedsFacts(WireModel):
    """The file of measured speeds of the recipe's model and method; `content` as `homelab.worker.training.speed_profile` wrote it, not checked here."""

    path: str
    found: bool
    problem: str | None = None
    content: dict[str, Any] | None = None
