"""What a node answers about its worker environment. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from homelab.facts.base import Address
from homelab.models import WireModel

Text = Annotated[str, Field(max_length=4096)]
Bytes = Annotated[int, Field(ge=0)]


class NodeState(WireModel):
    """`setup-look`. `pythons`: "3.12" -> path on the node; `good` and `partial` are of the files that were asked for; `lock`: what is installed whole."""

    machine: Annotated[str, Field(pattern=r"^\w{1,40}\z")]
    libc: Annotated[str, Field(max_length=100)]
    pythons: dict[Annotated[str, Field(pattern=r"^3\.\d{1,3}\z")], Text]
    environment_exists: bool
    environment_is_ours: bool
    environment_python: Annotated[str, Field(max_length=100)]
    packages: dict[Text, Text]
    lock: Annotated[str, Field(max_length=100)]
    good: tuple[Text, ...]
    partial: dict[Text, Bytes]
    disk_free: Bytes
    folders: tuple[Text, ...] = ()


class ModelState(WireModel):
    """`model-look`. `folder`: where the model lies on the node; of the files that were asked for, `others` are there with another content, and not by setup."""

    folder: Text
    good: tuple[Text, ...]
    others: tuple[Text, ...]
    partial: dict[Text, Bytes]
    disk_free: Bytes


class Received(WireModel):
    """`setup-receive`, `setup-fetch` and `model-receive`."""

    have: Bytes


class Shared(WireModel):
    """`setup-share`: where this node serves files to the others."""

    address: Address
    port: Annotated[int, Field(ge=1, le=65535)]
    token: Annotated[str, Field(pattern=r"^[0-9a-f]{32}\z")]


class Made(WireModel):
    """`setup-make`."""

    packages: dict[Text, Text]
    said: tuple[Text, ...] = ()


class Removed(WireModel):
    """`setup-remove`."""

    removed: tuple[Text, ...]
    left: tuple[Text, ...]
