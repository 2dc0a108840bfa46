"""data: files that must already lie on the nodes are there, and the same everywhere."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from homelab.checks.commands import answered, copy_between, decimal_size, listed, on_node, path_word
from homelab.checks.evidence import Evidence, Finding
from homelab.checks.majority import majority
from homelab.config.cluster import Node
from homelab.facts import Facts

ID = "data"


def judge(evidence: Evidence) -> Iterator[Finding]:
    """fail where a file is missing or has another content than on most nodes (sha256)."""
    if evidence.recipe is None:
        yield Finding(ID, "", "ok", "needs a recipe: homelab preflight RECIPE")
        return
    if not evidence.data:
        yield Finding(ID, "", "ok", "nothing has to lie on the nodes: files are shipped, hub data is downloaded")
        return
    for node, facts in answered(evidence):
        found = [
            finding for role, path in evidence.data.items() for finding in _of_file(evidence, node, facts, role, path)
        ]
        yield from found or [Finding(ID, node.name, "ok", _summary(evidence, facts))]


def _of_file(evidence: Evidence, node: Node, facts: Facts, role: str, path: str) -> Iterator[Finding]:
    digests = {
        other.name: digest
        for other, its_facts in answered(evidence)
        if role in its_facts.data and its_facts.data[role].found and (digest := its_facts.data[role].sha256)
    }
    common = majority(digests, evidence.head) if digests else None
    like = [name for name, digest in digests.items() if digest == common]
    file = facts.data.get(role)
    if file is None or not file.found:
        problem = (file.problem if file else None) or "it is not there"
        if like:
            hint = _copy(evidence, like[0], node, path)
        else:
            hint = f'copy it to {path_word(path)} on every node, or edit the recipe: a path beside it is shipped ([data] {role} = "FILE")'
        yield Finding(ID, node.name, "fail", f"{role} file {path}: {problem}", hint)
    elif node.name in digests and digests[node.name] != common:
        message = f"{role} file {path} is not the one of {listed(like)} (sha256 {digests[node.name][:12]}, there {str(common)[:12]})"
        yield Finding(ID, node.name, "fail", message, _copy(evidence, like[0], node, path))


def _copy(evidence: Evidence, source: str, node: Node, path: str) -> str:
    make_folder = on_node(node, f"mkdir -p {path_word(posixpath.dirname(path))}")
    return f"{make_folder} && {copy_between(evidence.cluster.node(source), path, node, path)}"


def _summary(evidence: Evidence, facts: Facts) -> str:
    sizes = [f"{role} {decimal_size(facts.data[role].size_bytes or 0)}" for role in evidence.data if role in facts.data]
    return ", ".join(sizes)
