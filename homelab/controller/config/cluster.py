"""cluster.toml: the machines, as their owner believes them to be. Preflight compares the belief with what is there."""

from __future__ import annotations

import ipaddress
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from homelab.controller.base import daily_hours
from homelab.controller.base.models import ConfigModel
from homelab.controller.config.environment import NodeEnvironment

# A node's name becomes a folder and a table heading on every machine; anything beyond this would only cause trouble there.
_NAME = re.compile(r"[^\W_][\w.-]*")
# What OpenSSH itself refuses in host and user names (ssh.c, valid_hostname and valid_ruser), because ssh_config may hand them to a shell.
_SHELL_CHARACTERS = frozenset("'`\"$\\;&<>|(){}")


def is_node_name(name: str) -> bool:
    """Whether a node can be called this."""
    return _NAME.fullmatch(name) is not None and len(name) <= 64


def _check_name(name: str) -> str:
    if not is_node_name(name):
        raise ValueError("a name starts with a letter or digit and holds letters, digits, '.', '_' and '-' (at most 64)")
    return name


def _check_host(host: str) -> str:
    if not _is_plain_word(host):
        raise ValueError("a host is an address, a host name or an alias of ~/.ssh/config, without spaces")
    if not all(0 < len(label) < 64 for label in host.removesuffix(".").split(".")):  # RFC 1035; Python's sockets raise for such a one
        raise ValueError("a host with 1 to 63 characters before, between and behind its dots, like 192.168.1.100 or gpu.lan")
    return host


def _check_user(user: str) -> str:
    if not _is_plain_word(user) or "@" in user or ":" in user:
        raise ValueError("the name of an account on the node, without spaces")
    return user


def _check_interface(interface: str) -> str:
    # 15 characters: IFNAMSIZ of linux/if.h without the final zero.
    if not _is_plain_word(interface) or "/" in interface or len(interface.encode()) > 15:
        raise ValueError("the name of a network interface of the node, like eth0 (`ip link` lists them)")
    return interface


def _is_plain_word(text: str) -> bool:
    return bool(text) and not text.startswith("-") and text.isprintable() and not any(c.isspace() or c in _SHELL_CHARACTERS for c in text)


def _check_address(address: str) -> str:
    try:
        return str(ipaddress.ip_address(address))
    except ValueError as error:
        raise ValueError("an IP address like 192.168.1.100 (a host name may resolve to 127.0.1.1 on the node itself)") from error


def _check_network(network: str) -> str:
    try:
        return str(ipaddress.ip_network(network))
    except ValueError as error:
        raise ValueError("a network like 192.168.1.0/24") from error


def _check_remote_path(path: str) -> str:
    if "\n" in path or "\r" in path or "\0" in path:
        raise ValueError("a path on one line")
    if not (path.startswith(("/", "~/")) or path == "~"):
        raise ValueError("a path on the node that starts with / or ~/")
    return str(PurePosixPath(path))


def _check_workdir(path: str) -> str:
    if ":" in path:
        raise ValueError("a path without ':' (Python would read it as two folders)")
    return _check_remote_path(path)


# They run on every node, or belong to a run: with such a name in `yield_to` the node would never train.
_NEVER_THE_OWNERS = re.compile(r"(?i:homelab|python[\d.]*|pt_main_thread|torchrun|sshd?|sshd-session|(ba|da|z)?sh|systemd|nvidia-smi)")


def _check_program(name: str) -> str:
    if not name.isprintable() or name != name.strip() or not name or "/" in name or len(name) > 64:
        raise ValueError('the name of a program as `ps -e` shows it, like "steam": without a path, at most 64 characters')
    if _NEVER_THE_OWNERS.fullmatch(name):
        raise ValueError(f'a program that only the owner starts ("{name}" runs for homelab, too, and the node would never train)')
    return name


Name = Annotated[str, AfterValidator(_check_name)]
Host = Annotated[str, AfterValidator(_check_host)]
Address = Annotated[str, AfterValidator(_check_address)]
Network = Annotated[str, AfterValidator(_check_network)]
RemotePath = Annotated[str, AfterValidator(_check_remote_path)]
Workdir = Annotated[str, AfterValidator(_check_workdir)]
User = Annotated[str, AfterValidator(_check_user)]
Interface = Annotated[str, AfterValidator(_check_interface)]
Hours = Annotated[str, AfterValidator(daily_hours.tidy)]
Program = Annotated[str, AfterValidator(_check_program)]


class Gpu(ConfigModel):
    """One card, as the owner believes it to be. `vram_gb` is in units of 2**30 bytes, as the box says it.

    `uuid` (or its beginning, as `nvidia-smi -L` shows it) or `index` (nvidia-smi's number) say which of several cards is meant.
    """

    model: str = Field(min_length=1)
    vram_gb: float = Field(gt=0, le=1024)
    uuid: str | None = Field(default=None, pattern=r"^GPU-[0-9A-Fa-f][0-9A-Fa-f-]*$", max_length=64)
    index: int | None = Field(default=None, ge=0, le=63)

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Gpu:
        if self.uuid is not None and self.index is not None:
            raise ValueError("give either `uuid` or `index` to name the card")
        return self


class Node(ConfigModel):
    """One machine. Where `gpus` names fewer cards than it has, the others take no part. `environment` is that of whatever runs on it.

    When it is its owner's: outside `hours` (by its own clock; "" is always), while a program of `yield_to` runs, and as `yield_when` says.
    """

    name: Name
    host: Host
    port: int = Field(default=22, ge=1, le=65535)
    user: User | None = None
    identity_file: str | None = None
    python: RemotePath = "~/.homelab/env/bin/python"
    unsloth_python: RemotePath = "~/.homelab/unsloth/bin/python"
    workdir: Workdir = "~/homelab"
    lan_address: Address | None = None
    interface: Interface | None = None
    gpus: tuple[Gpu, ...] = ()
    speed: float | None = Field(default=None, gt=0)
    hours: Hours = ""
    yield_to: Annotated[tuple[Program, ...], Field(max_length=64)] = ()
    yield_when: Literal["gpu", "input", "never"] = "never"
    environment: NodeEnvironment = {}
    _known_hosts: str | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _each_card_once(self) -> Node:
        pointed = [gpu.uuid.lower() if gpu.uuid else gpu.index for gpu in self.gpus if gpu.uuid or gpu.index is not None]
        twice = next((one for place, one in enumerate(pointed) if one in pointed[:place]), None)
        if twice is not None:
            raise ValueError(f"two entries of `gpus` name the same card ({twice})")
        return self

    @property
    def known_hosts(self) -> str | None:
        """The cluster's own known_hosts file, which commands for people must name too; None: ssh's own."""
        return self._known_hosts

    @property
    def rank_count(self) -> int:
        """Processes on this node: one per GPU, one for a CPU-only machine."""
        return max(1, len(self.gpus))


class EnergyPrice(ConfigModel):
    """The section [energy]: the price of electricity, in `currency` (a word or a sign behind the number). None: not known, so no price is shown."""

    price_per_kwh: float | None = Field(default=None, ge=0, le=1_000_000)
    currency: str = Field(default="", max_length=12)

    def cost(self, kwh: float | None) -> float | None:
        """Of so much energy; None where the energy or the price is not known."""
        return kwh * self.price_per_kwh if kwh is not None and self.price_per_kwh is not None else None


Occasion = Literal["done", "failed", "gave up", "needs you", "queue over"]


class Notify(ConfigModel):
    """Who is told what became of a run, and of the queue. `command`: for /bin/sh, gets the words on its standard input; `apprise`: a configuration file of apprise.

    "failed": it is being recovered; "gave up": it is not any more; "needs you": a recovery waits for something;
    "queue over": nothing of the queue trains any more.
    """

    command: str | None = Field(default=None, min_length=1, max_length=2000)
    apprise: str | None = Field(default=None, min_length=1, max_length=1000)
    on: tuple[Occasion, ...] = get_args(Occasion)


NetworkProfileName = Literal["wifi", "1gbe", "2.5gbe", "10gbe", "thunderbolt"]
"""The kinds of wire between nodes that NCCL is told something of (`homelab.controller.planning.environment.network_profile`)."""


class NetworkSettings(ConfigModel):
    """The section [network]: which kind of wire lies between the nodes. "auto": as it is measured."""

    profile: Literal["auto", NetworkProfileName] = "auto"


class Cluster(ConfigModel):
    """All of cluster.toml, defaults merged in. `known_hosts` is absolute or None."""

    name: Name = "homelab"
    network: Network | None = None
    known_hosts: str | None = None
    energy: EnergyPrice = EnergyPrice()
    notify: Notify = Notify()
    wire: NetworkSettings = NetworkSettings()
    nodes: tuple[Node, ...]
    left_out: tuple[str, ...] = ()
    """Nodes of the file that do not take part now (--nodes, or not reachable); never written by a person."""

    def model_post_init(self, context: Any) -> None:
        """Each node knows the file that its host key lies in."""
        for node in self.nodes:
            node._known_hosts = self.known_hosts

    def node(self, name: str) -> Node:
        """The node of this name; KeyError when there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def only(self, names: tuple[str, ...]) -> Cluster:
        """The cluster with just these nodes, in the file's order."""
        removed = tuple(node.name for node in self.nodes if node.name not in names)
        kept = tuple(node for node in self.nodes if node.name in names)
        return self.model_copy(update={"nodes": kept, "left_out": (*self.left_out, *removed)})
