"""A cluster.toml that is not written yet: the text that is there, the nodes to be added, and what is new of the old ones. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from homelab.controller.config.cluster import Cluster
from homelab.controller.config.load import parse_cluster
from homelab.controller.facts.node import Facts
from homelab.controller.features.discover import cluster_edit, proposal
from homelab.controller.features.discover.candidates import Candidate, is_address, name_for
from homelab.controller.features.discover.cluster_edit import NewNode


@dataclass(frozen=True)
class Draft:
    """`text` is the file as it is (None: there is none), `old` its cluster; `new` nodes by name, and `changed`: keys of old ones."""

    path: Path
    text: str | None
    old: Cluster | None
    new: dict[str, NewNode] = field(default_factory=dict)
    changed: dict[str, dict[str, cluster_edit.Value]] = field(default_factory=dict)

    @property
    def old_names(self) -> tuple[str, ...]:
        """The nodes that the file has."""
        return tuple(node.name for node in self.old.nodes) if self.old else ()

    def with_candidates(self, candidates: Iterable[Candidate]) -> tuple[Draft, dict[str, Candidate]]:
        """The draft with a node for each of them, and each by the node's name."""
        named: dict[str, Candidate] = {}
        for candidate in candidates:
            named[name_for(candidate, "", {*self.old_names, *self.new, *named})] = candidate
        new = {name: NewNode(name, candidate.host, candidate.user, candidate.port) for name, candidate in named.items()}
        return replace(self, new={**self.new, **new}), named

    def with_this_machine(self, hostname: str) -> tuple[Draft, str]:
        """The draft with this machine as a node, and that node's name."""
        name = name_for(Candidate("local", "this machine", name=hostname), "", {*self.old_names, *self.new})
        return replace(self, new={**self.new, name: NewNode(name, "local")}), name

    def with_user(self, name: str, user: str) -> Draft:
        """The draft in which this node is logged in to as another user."""
        if name in self.new:
            return replace(self, new={**self.new, name: replace(self.new[name], user=user)})
        return self._with_keys(name, {"user": user})

    def with_place(self, name: str, candidate: Candidate) -> Draft:
        """The draft in which an old node has moved to where this candidate is."""
        assert self.old is not None
        node = self.old.node(name)
        keys: dict[str, cluster_edit.Value] = {"host": candidate.host}
        if (candidate.port or 22) != node.port:
            keys["port"] = candidate.port or 22
        if node.lan_address == node.host and is_address(candidate.host):
            keys["lan_address"] = candidate.host
        return self._with_keys(name, keys)

    def without_user(self, name: str) -> Draft:
        """The draft in which the user of an old node stays as it is."""
        kept = {key: value for key, value in self.changed.get(name, {}).items() if key != "user"}
        others = {other: keys for other, keys in self.changed.items() if other != name}
        return replace(self, changed={**others, **({name: kept} if kept else {})})

    def _with_keys(self, name: str, keys: Mapping[str, cluster_edit.Value]) -> Draft:
        return replace(self, changed={**self.changed, name: {**self.changed.get(name, {}), **keys}})

    def only(self, names: Iterable[str]) -> Draft:
        """The draft with just these of the new nodes."""
        kept = set(names)
        return replace(self, new={name: node for name, node in self.new.items() if name in kept})

    def described(self, facts: Mapping[str, Facts]) -> Draft:
        """The new nodes with their cards, a line about each, and the names that machines give themselves where only an address was known."""
        new: dict[str, NewNode] = {}
        for name, node in self.new.items():
            if name in facts:
                if is_address(name):
                    name = name_for(Candidate(node.host, ""), facts[name].system.hostname, {*self.old_names, *self.new, *new})
                one = facts[node.name]
                new[name] = replace(node, name=name, gpus=proposal.gpus_of(one), about=proposal.about(one))
        return replace(self, new=new)

    def changes(self, facts: Mapping[str, Facts]) -> dict[str, dict[str, cluster_edit.Value]]:
        """What is to be written into each old node: keys and values."""
        found = {name: dict(keys) for name, keys in self.changed.items()}
        for node in self.old.nodes if self.old else ():
            if node.name in facts and proposal.has_changed_cards(node, facts[node.name]):
                seen = proposal.gpus_of(facts[node.name])
                if seen:
                    found.setdefault(node.name, {})["gpus"] = list(seen)
        return found

    def render(self, changes: Mapping[str, Mapping[str, cluster_edit.Value]], network: str | None) -> str:
        """The text to be written. Raises InputError where a value cannot be replaced without loss."""
        text = cluster_edit.NEW_FILE if self.text is None else self.text
        for index, name in enumerate(self.old_names):
            if name in changes:
                text = cluster_edit.with_keys(text, index, changes[name])
        if network is not None:
            text = cluster_edit.with_network(text, network)
        return cluster_edit.with_nodes(text, list(self.new.values()))

    def cluster(self) -> Cluster:
        """The cluster as it would be read. Raises InputError with all faults of the text."""
        return parse_cluster(self.render(self.changed, None), self.path)
