"""cluster.toml: the machines, as their owner believes them to be. Preflight compares the belief with what is there."""

from __future__ import annotations

import ipaddress
import re
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

# A node's name becomes a folder and a table heading on every machine; anything beyond this would only cause trouble there.
_NAME = re.compile(r"^\w[\w.-]*$")


def _check_name(name: str) -> str:
    if not _NAME.match(name) or len(name) > 64:
        raise ValueError(
            "a name starts with a letter or digit and holds letters, digits, '.', '_' and '-' (64 at most)"
        )
    return name


def _check_host(host: str) -> str:
    if host.startswith("-") or any(c.isspace() or ord(c) < 32 for c in host) or not host:
        raise ValueError("a host is an address, a host name or an alias of ~/.ssh/config, without spaces")
    return host


def _check_address(address: str) -> str:
    try:
        return str(ipaddress.ip_address(address))
    except ValueError as error:
        raise ValueError(
            "an IP address like 192.168.1.100 (a host name may resolve to 127.0.1.1 on the node itself)"
        ) from error


def _check_network(network: str) -> str:
    try:
        return str(ipaddress.ip_network(network))
    except ValueError as error:
        raise ValueError("a network like 192.168.1.0/24") from error


def _check_remote_path(path: str) -> str:
    if "\n" in path or "\0" in path:
        raise ValueError("a path on one line")
    if not (path.startswith(("/", "~/")) or path == "~"):
        raise ValueError("a path on the node that starts with / or ~/")
    return str(PurePosixPath(path))


Name = Annotated[str, AfterValidator(_check_name)]
Host = Annotated[str, AfterValidator(_check_host)]
Address = Annotated[str, AfterValidator(_check_address)]
Network = Annotated[str, AfterValidator(_check_network)]
RemotePath = Annotated[str, AfterValidator(_check_remote_path)]


class Strict(BaseModel):
    """Frozen, and unknown keys are faults: a misspelt key that is ignored costs its owner an evening."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Gpu(Strict):
    """One card, as the owner believes it to be. `vram_gb` is in units of 2**30 bytes, as the box says it."""

    model: str = Field(min_length=1)
    vram_gb: float = Field(gt=0, le=1024)


class Node(Strict):
    """One machine."""

    name: Name
    host: Host
    port: int = Field(default=22, ge=1, le=65535)
    user: str | None = None
    identity_file: str | None = None
    python: RemotePath = "~/.homelab/env/bin/python"
    workdir: RemotePath = "~/homelab"
    lan_address: Address | None = None
    interface: str | None = None
    gpus: tuple[Gpu, ...] = ()
    speed: float | None = Field(default=None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, data: Any) -> Any:
        # TOML has only lists; strict mode would ask the person for a tuple.
        if isinstance(data, dict) and isinstance(data.get("gpus"), list):
            data = {**data, "gpus": tuple(data["gpus"])}
        return data

    @property
    def rank_count(self) -> int:
        """Processes on this node: one per GPU, one for a CPU-only machine."""
        return max(1, len(self.gpus))


class Cluster(Strict):
    """All of cluster.toml, defaults merged in. `known_hosts` is absolute or None."""

    name: Name = "homelab"
    network: Network | None = None
    known_hosts: str | None = None
    nodes: tuple[Node, ...]
    left_out: tuple[str, ...] = ()
    """Nodes of the file that do not take part now (--nodes, or not reachable); never written by a person."""

    def node(self, name: str) -> Node:
        """The node of this name; KeyError when there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def only(self, names: tuple[str, ...]) -> Cluster:
        """The cluster with just these nodes, in the file's order."""
        gone = tuple(node.name for node in self.nodes if node.name not in names)
        kept = tuple(node for node in self.nodes if node.name in names)
        return self.model_copy(update={"nodes": kept, "left_out": (*self.left_out, *gone)})
