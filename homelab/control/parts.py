"""Which machine of today is which node of a run: names and addresses in cluster.toml may have changed since, the run's folders have not moved."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from homelab.errors import HomelabError
from homelab.remote.fanout import Fleet

GONE = "it is not in cluster.toml"


def poll(
    fleet: Fleet, request: Mapping[str, Any], planned: Collection[str], *, timeout_s: float = 20.0
) -> tuple[dict[str, dict[str, Any]], dict[str, str], dict[str, str]]:
    """`poll` of the nodes `planned`: the answers, why there is none and what would bring one, by the names that the nodes have in the run.

    An answer's own "node" is its name of today. The other nodes of the cluster are asked only where one of `planned` is not to be found by
    its name.
    """
    everybody = [node.name for node in fleet.cluster.nodes]
    asked = [name for name in planned if name in everybody]
    answers, errors = fleet.ask("poll", request, names=asked, timeout_s=timeout_s)
    if len(asked) < len(set(planned)) or any(_part(answer, name) != name for name, answer in answers.items()):
        more, _ = fleet.ask("poll", request, names=[name for name in everybody if name not in asked], timeout_s=timeout_s)
        answers = {**answers, **more}
    found, silent = sorted_out(answers, errors, planned)
    return found, silent, {name: error.hint for name, error in errors.items() if name in silent and error.hint}


def sorted_out(
    answers: Mapping[str, dict[str, Any]], errors: Mapping[str, HomelabError], planned: Collection[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The pure part of `poll`. A machine that has taken part under another name does not speak for the name it has today."""
    found: dict[str, dict[str, Any]] = {}
    for name, answer in answers.items():
        part = _part(answer, name)
        if part in planned and (part == name or part not in found):
            found[part] = answer
    silent = {name: errors[name].message for name in planned if name in errors and name not in found}
    silent |= {name: f"another machine has its name now (here it was {_part(answers[name], name)})" for name in planned if name in answers and name not in found}
    silent |= {name: GONE for name in planned if name not in found and name not in silent}
    return found, silent


def _part(answer: Mapping[str, Any], name: str) -> str:
    """The name under which who answers to `name` takes part in the run."""
    run = answer.get("run")
    part = run.get("as_node") if isinstance(run, dict) else None
    return part if isinstance(part, str) and part else name


def unseen(
    planned: Mapping[str, str], stopped: Mapping[str, Mapping[str, Any]], errors: Mapping[str, HomelabError], hosts: Mapping[str, str]
) -> dict[str, HomelabError]:
    """The nodes of a run of which nobody has looked whether something of it still runs there, and why. Pure.

    `planned`: node -> its address at the launch, empty where nobody knows; `hosts`: node -> that of today. `stopped`: what the nodes of
    today have answered to `stop`, `errors` why others have not.
    """
    looked_at = {part for answer in stopped.values() for part in answer.get("as_nodes", ())}
    found: dict[str, HomelabError] = {}
    for name, host in planned.items():
        if name in looked_at:
            continue
        if name in errors:
            found[name] = errors[name]
        elif name not in stopped:
            found[name] = HomelabError(f"{GONE} any more", where=f"node {name}", hint="add it to cluster.toml, then stop again")
        elif stopped[name].get("as_nodes"):
            took = ", ".join(stopped[name]["as_nodes"])
            found[name] = HomelabError(
                f"the machine that has its name now was {took} in this run, and no other one knows of {name}", where=f"node {name}",
                hint="add the machine that it was to cluster.toml, then stop again",
            )  # fmt: skip
        elif host and host != hosts.get(name):
            found[name] = HomelabError(
                f"its address was {host} at the launch, and the machine at {hosts.get(name)} does not know the run", where=f"node {name}",
                hint=f"give a node the address {host} in cluster.toml, then stop again",
            )  # fmt: skip
    return found
