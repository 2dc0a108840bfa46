"""What the judges look at: everything that was seen, gathered before any judging. Plain data; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from homelab.config.cluster import Cluster
from homelab.config.recipe import Recipe
from homelab.errors import HomelabError
from homelab.facts import Facts

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One judgement about one node (or about the whole cluster: node ""). A warn or fail carries the mending command."""

    check: str
    node: str
    level: Level
    message: str
    hint: str = ""

    def as_dict(self) -> dict[str, str]:
        """The `--json` shape."""
        return {"check": self.check, "node": self.node, "level": self.level, "message": self.message, "hint": self.hint}


@dataclass(frozen=True)
class Link:
    """One dial from a node to another node's address and port: latency in milliseconds, or why it failed.

    `throughput_bytes_per_s` is what went through from source to target; it is measured on one port of each pair.
    """

    source: str
    target: str
    address: str
    port: int
    is_rendezvous: bool
    latency_ms: float | None = None
    error: str | None = None
    throughput_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Evidence:
    """All that was seen in one preflight.

    `unreachable` holds the error of each node that did not answer (its class and hint say whether it was the address, the
    key or the host key). `clock_offsets_s` is node clock minus controller clock. `data` maps "train"/"eval" to the path on
    the nodes for files that must already lie there (shipped files and hub ids are not in it).
    """

    cluster: Cluster
    head: str
    master_port: int
    facts: Mapping[str, Facts] = field(default_factory=dict)
    unreachable: Mapping[str, HomelabError] = field(default_factory=dict)
    clock_offsets_s: Mapping[str, float] = field(default_factory=dict)
    latencies_ms: Mapping[str, float] = field(default_factory=dict)
    links: tuple[Link, ...] = ()
    lan: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # node -> (LAN address, interface) as the plan chose
    recipe: Recipe | None = None
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def throughputs(self) -> dict[tuple[str, str], float]:
        """Bytes per second from source to target, for the pairs that were measured."""
        return {
            (link.source, link.target): link.throughput_bytes_per_s
            for link in self.links
            if link.throughput_bytes_per_s is not None
        }
