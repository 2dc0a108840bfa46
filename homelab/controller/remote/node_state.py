"""What a node answers about its worker environment. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from homelab.controller.base.models import WireModel
from homelab.controller.facts.base import Address

Text = Annotated[str, Field(max_length=4096)]
Bytes = Annotated[int, Field(ge=0, lt=2**63)]
Texts = Annotated[tuple[Text, ...], Field(max_length=10_000)]
Table = Annotated[dict[Text, Text], Field(max_length=10_000)]
Sizes = Annotated[dict[Text, Bytes], Field(max_length=10_000)]


class NodeState(WireModel):
    """`setup-look`. `pythons`: "3.12" -> path on the node; `good` and `partial` are of the files that were asked for; `lock`: what is installed whole."""

    machine: Annotated[str, Field(pattern=r"^\w{1,40}\z")]
    libc: Annotated[str, Field(max_length=100)]
    pythons: Annotated[dict[Annotated[str, Field(pattern=r"^3\.\d{1,3}\z")], Text], Field(max_length=1000)]
    environment_exists: bool
    environment_is_ours: bool
    environment_python: Annotated[str, Field(max_length=100)]
    packages: Table
    lock: Annotated[str, Field(max_length=100)]
    good: Texts
    partial: Sizes
    disk_free: Bytes
    folders: Texts = ()


class ModelState(WireModel):
    """`model-look`. `folder`: where the model lies on the node; of the files that were asked for, `others` are there with another content, and not by setup."""

    folder: Text
    good: Texts
    others: Texts
    partial: Sizes
    disk_free: Bytes


class Received(WireModel):
    """`setup-receive`, `setup-fetch` and `model-receive`."""

    have: Bytes


class Shared(WireModel):
    """`setup-share`: where this node serves files to the others."""

    address: Address
    port: Annotated[int, Field(ge=1, le=65535)]
    token: Annotated[str, Field(pattern=r"^[0-9a-f]{32}\z")]


class MadeEnvironment(WireModel):
    """`setup-make`."""

    packages: Table
    said: Texts = ()


class Removed(WireModel):
    """`setup-remove`."""

    removed: Texts
    left: Texts
