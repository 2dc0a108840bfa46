"""What a plan is made from: one value, that nothing of it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from homelab.controller.config.cluster import Cluster
from homelab.controller.config.recipe import Recipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.speed.dataset_size import DataFile
from homelab.controller.planning.speed.measured_cards import Table

Throughputs = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class PlanInputs:
    """A cluster (the reachable nodes), a recipe, and what is known of both.

    `facts` may be empty (offline): cluster.toml is believed then. `code` and `script` are the shipped code and a [script]'s file, `files`
    everything that is shipped, as paths below a node's work folder; without `script` the recipe's own path is taken. `data` has the size
    of the data that does not lie on the nodes, by role, `throughputs` bytes per second from node to node, where measured. `moment`: when the run
    was launched, UTC, where that is known. `config`: config.json of the model, where this machine has it. `measured_cards`: what others have
    measured on cards; with none, data sheets alone are believed. `last_layers`: (node, its card) -> the layers of a pipeline that it had before.
    """

    cluster: Cluster
    recipe: Recipe
    facts: Mapping[str, Facts]
    run: str
    port: int
    attempt: int = 1
    resume_step: int = 0
    code: str = "code"
    script: str | None = None
    files: tuple[str, ...] = ()
    data: Mapping[str, DataFile] = field(default_factory=dict)
    throughputs: Throughputs = field(default_factory=dict)
    moment: datetime | None = None
    config: Mapping[str, Any] | None = None
    measured_cards: Table = field(default_factory=Table)
    last_layers: Mapping[tuple[str, int], range] = field(default_factory=dict)
