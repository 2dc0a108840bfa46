"""The messages of the node program about what `homelab setup` brings: a worker environment, and the files of a model."""

from __future__ import annotations

from typing import Annotated

from homelab.shared.markers import Longest, Matches
from homelab.shared.protocol.marks import ADDRESS, Count, Path, PortNumber
from homelab.shared.protocol.message import Message
from homelab.shared.protocol.request import Request

Texts = Annotated[tuple[Path, ...], Longest(10_000)]
Table = Annotated[dict[Path, Path], Longest(10_000)]
Sizes = Annotated[dict[Path, Count], Longest(10_000)]


class LookRequest(Request):
    """`setup-look`. `environment`: its folder; `files`: name in setup's folder -> sha256."""

    environment: Path
    files: Table = {}


class MakeRequest(Request):
    """`setup-make`. `python`: a path, "" for the one that was sent; `version`: its "3.12". `lock`: the digest of requirements.txt. `is_closed` False: it
    holds less than its packages name, as for Unsloth."""

    environment: Path
    python: Path
    version: Annotated[str, Longest(20)]
    lock: Annotated[str, Longest(100)]
    is_closed: bool


class ModelRequest(Request):
    """`model-look` and `model-name`. `model`: a path, or a name of the hub with its `commit`, and the `revision` (branch, tag, commit) by which a recipe
    means it; `files`: name -> sha256."""

    model: Path
    commit: Annotated[str, Longest(40)] = ""
    revision: Path = ""
    files: Table = {}


class PieceRequest(Request):
    """`setup-receive` and `model-receive`, with bytes: those of a file from `offset` on. `size`: of all of it. `model`, `commit`: as above."""

    name: Path
    sha256: Annotated[str, Longest(64)]
    size: Count
    offset: Count
    model: Path = ""
    commit: Annotated[str, Longest(40)] = ""


class FetchRequest(PieceRequest):
    """`setup-fetch`: at `most` so many bytes of a file. `proxies`: by scheme."""

    url: Path
    most: Count
    proxies: Annotated[dict[str, str], Longest(10)] = {}


class ShareRequest(Request):
    """`setup-share`. `address` "": the one that the controller has connected to. `files`: sha256 -> name, and the model and commit that it is of."""

    address: Annotated[str, Longest(100)]
    files: Annotated[dict[str, dict[str, str]], Longest(10_000)]


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
    content, and not by setup. `is_named`: the revision that was asked for means this commit here."""

    folder: Path
    good: Texts
    others: Texts
    partial: Sizes
    disk_free: Count
    is_named: bool = True


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
    """The answer of `setup-remove`: folders. `links`: those that a person has moved elsewhere, and where to."""

    removed: Texts
    left: Texts
    links: Table = {}
