"""The messages of the node program about what `homelab setup` brings: a worker environment, and the files of a model."""

from __future__ import annotations

from typing import Annotated

from homelab.shared.markers import Longest, Matches
from homelab.shared.protocol.marks import ADDRESS, Count, Path, PortNumber
from homelab.shared.protocol.message import Message

Texts = Annotated[tuple[Path, ...], Longest(10_000)]
Table = Annotated[dict[Path, Path], Longest(10_000)]
Sizes = Annotated[dict[Path, Count], Longest(10_000)]


class SetupState(Message):
    """The answer of `setup-look`. `pythons`: "3.12" -> path on the node; `good` and `partial` are of the files that were asked for;
    `lock`: what is installed whole."""

    machine: Annotated[str, Matches(r"^\w{1,40}\z")]
    libc: Annotated[str, Longest(100)]
    pythons: Annotated[dict[Annotated[str, Matches(r"^3\.\d{1,3}\z")], Path], Longest(1000)]
    environment_exists: bool
    environment_is_ours: bool
    environment_python: Annotated[str, Longest(100)]
    packages: Table
    lock: Annotated[str, Longest(100)]
    good: Texts
    partial: Sizes
    disk_free: Count
    folders: Texts = ()


class ModelState(Message):
    """The answer of `model-look`. `folder`: where the model lies on the node; of the files that were asked for, `others` are there with another
    content, and not by setup."""

    folder: Path
    good: Texts
    others: Texts
    partial: Sizes
    disk_free: Count


class SetupReceived(Message):
    """The answer of `setup-receive`, `setup-fetch` and `model-receive`: how many bytes of the file are there."""

    have: Count


class SetupShared(Message):
    """The first line of `setup-share`: where this node serves files to the others."""

    address: Annotated[str, ADDRESS]
    port: PortNumber
    token: Annotated[str, Matches(r"^[0-9a-f]{32}\z")]


class SetupMade(Message):
    """The answer of `setup-make`: what is installed now, and the last words of uv."""

    packages: Table
    said: Texts = ()


class SetupRemoved(Message):
    """The answer of `setup-remove`: folders."""

    removed: Texts
    left: Texts
