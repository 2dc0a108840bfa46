"""The base of every request to the node program. The controller builds it, the node validates it (`homelab.node.requests`)."""

from __future__ import annotations

from typing import Annotated

from homelab.shared.markers import Holds, Longest
from homelab.shared.protocol import layout
from homelab.shared.protocol.marks import Path
from homelab.shared.protocol.message import Message

UsableName = Annotated[str, Holds(layout.checked)]
Variables = Annotated[dict[str, str], Longest(1000)]


class Request(Message):
    """What every request says. The controller's agent fills it in: no caller has to."""

    node: UsableName = ""
    workdir: Path = ""
    node_environment: Variables = {}  # for everything that the verb starts; the recipe goes before cluster.toml
    recipe_environment: Variables = {}


class RunRequest(Request):
    """A question about one run."""

    run: UsableName
