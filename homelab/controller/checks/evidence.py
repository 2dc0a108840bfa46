"""The evidence that the checks judge: all answers of the nodes, gathered before the first judgement. Plain data; no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import NO_COMMAND, Command, Hint, homelab
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.config.recipe import Recipe
from homelab.controller.facts.collective_check import CollectiveResult
from homelab.controller.facts.node import Facts
from homelab.controller.planning.types import Plan
from homelab.shared.protocol.worker_messages import BuildResult, SampleResult

Level = Literal["ok", "warn", "fail"]
NOT_DIALLED = "not dialled: "  # how the error of a `Link` begins that could not even be tried


@dataclass(frozen=True)
class Finding:
    """One judgement about one node (or about the whole cluster: node ""). A warn or fail carries a hint that tells how to fix it.

    `check` is a subject ("gpu") where all is well, and the id of one check ("gpu.memory") where it is not. `fix` is the command
    that fixes it, where one command does; the hint has it, too.
    """

    check: str
    node: str
    level: Level
    message: str
    hint: str = ""
    fix: Command = NO_COMMAND
    is_busy: bool = False  # nothing is wrong with the node, and it has other work

    @property
    def keeps_out(self) -> bool:
        """No training may be started on its node."""
        return self.level == "fail" or self.is_busy

    @property
    def where(self) -> str:
        """The second part of an error that it becomes."""
        return f"node {self.node}, check {self.check}" if self.node else f"check {self.check}"

    @property
    def subject(self) -> str:
        """The row of the table it stands in."""
        return self.check.partition(".")[0]

    def as_dict(self) -> dict[str, str]:
        """The `--json` shape."""
        return {
            "check": self.check, "node": self.node, "level": self.level, "message": self.message, "hint": self.hint, "fix": self.fix,
        }  # fmt: skip


@dataclass(frozen=True)
class Link:
    """One dial from a node to another node's address and port: latencies of its connects in milliseconds, or why it failed.

    What is measured once for each pair stands on one of its links: `throughput_bytes_per_s` is what went through from source to
    target, `stalled` says that bytes did not arrive though connects did. Of probes of one packet each, `carried_bytes` is the
    largest that arrived and `lost_bytes` the largest that never did though smaller ones came; both None: not known. `repeats` counts
    the packets of its handshakes that were sent again; `loss` is the share of small packets that never arrived, twice.
    """

    source: str
    target: str
    address: str
    port: int
    is_rendezvous: bool
    latency_ms: float | None = None
    error: str | None = None
    throughput_bytes_per_s: float | None = None
    median_ms: float | None = None
    worst_ms: float | None = None
    stalled: str | None = None
    carried_bytes: int | None = None
    lost_bytes: int | None = None
    repeats: int = 0
    loss: float | None = None


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
    answer_seconds: Mapping[str, float] = field(default_factory=dict)  # how long each node took for its facts
    greetings_s: Mapping[str, float] = field(default_factory=dict)  # from the connection to the first byte of each SSH server
    without_effect: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # keys of ssh_config that are not obeyed, with the reason
    links: tuple[Link, ...] = ()
    lan: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # node -> (LAN address, interface) as the plan chose
    code_hash: str | None = None  # of the code that is shipped (`homelab.controller.remote.ship`)
    recipe: Recipe | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    collective: CollectiveResult | None = None  # the collective smoke test; None: not run
    sample: SampleResult | None = None  # of the training data; None: not looked at
    build: BuildResult | None = None  # the base model without its weights; None: not built
    plan: Plan | None = None
    refused: HomelabError | None = None  # why there is no plan, when one was tried

    @property
    def losses(self) -> dict[tuple[str, str], float]:
        """The share of packets that is lost from source to target, for the pairs that lose any."""
        return {(link.source, link.target): link.loss for link in self.links if link.loss}

    @property
    def throughputs(self) -> dict[tuple[str, str], float]:
        """Bytes per second from source to target, for the pairs that were measured."""
        return {(link.source, link.target): link.throughput_bytes_per_s for link in self.links if link.throughput_bytes_per_s is not None}


def answered(evidence: Evidence) -> Iterator[tuple[Node, Facts]]:
    """The nodes that gave facts, in the order of cluster.toml."""
    for node in evidence.cluster.nodes:
        if node.name in evidence.facts:
            yield node, evidence.facts[node.name]


Value = TypeVar("Value", bound=Hashable)


def majority(values: Mapping[str, Value], first: str = "") -> Value:
    """The most frequent of the nodes' values. Of equally frequent ones: that of node `first`, or else the one that comes first."""
    counts = Counter(values.values())
    best = max(counts.values())
    if first in values and counts[values[first]] == best:
        return values[first]
    return next(value for value in values.values() if counts[value] == best)


def lacks_recipe(evidence: Evidence) -> str | None:
    """What is missing for a check that needs a recipe; None with one."""
    return Hint("needs a recipe: {}", homelab("preflight RECIPE")) if evidence.recipe is None else None


def lacks_model(evidence: Evidence) -> str | None:
    """The same for a check that needs a recipe which names a base model."""
    if evidence.recipe is not None and evidence.recipe.model is None:
        return "the recipe's [script] brings its own"
    return lacks_recipe(evidence)
