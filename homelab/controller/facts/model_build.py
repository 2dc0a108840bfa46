"""The base model as one node built it without its weights (`homelab.worker.tools.model_build`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from homelab.controller.base.models import WireModel
from homelab.controller.base.sanitize import plain_lines

Count = Annotated[int, Field(ge=0)]
Words = Annotated[str, Field(max_length=2000), AfterValidator(plain_lines)]  # a node's, and from a model's files: they reach a terminal


class BuildFinding(WireModel):
    """One thing that a person should know before a launch. `topic` is the check that it belongs to."""

    topic: Literal["hub", "kind", "stored", "weights", "adapters", "gradient", "tokenizer"]
    level: Literal["warn", "fail"]
    message: Words
    where: Words = ""
    hint: Words = ""


class BuildResult(WireModel):
    """What `homelab.controller.features.preflight.model_build.look` brings back. `refused` says why no node could build it.

    `trained` and `total` are numbers of weights (0: it could not be built), `adapted` the modules with adapters and how many, `largest_id` the
    largest id of the tokenizer, `beyond` the first tokens (id: text) that the embedding with `embedding_rows` lacks, `positions` the most tokens of
    a row (None: any), `loose_experts_bytes` what a quantised base leaves in 16 bits (None: it is not quantised). Of a model that no node has, and whose
    small files came from the hub, `config` is its config.json, and `has_chat_template` as in `ModelFacts`.
    """

    node: str = ""
    refused: Words | None = None
    findings: Annotated[tuple[BuildFinding, ...], Field(max_length=50)] = ()
    trained: Count = 0
    total: Count = 0
    adapted: Annotated[dict[Words, Count], Field(max_length=100)] = {}
    chance: Annotated[tuple[Words, ...], Field(max_length=100)] = ()
    tied: bool = False
    embedding_rows: Count | None = None
    positions: Count | None = None
    largest_id: Count | None = None
    beyond: Annotated[dict[Words, Words], Field(max_length=20)] = {}
    loose_experts_bytes: Count | None = None
    config: dict[str, Any] | None = None
    has_chat_template: bool | None = None
    seconds: float = 0.0


class BuildAnswer(WireModel):
    """`build-model`."""

    built: BuildResult
