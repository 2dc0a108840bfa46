"""Which machine of today is which node of a run: names and addresses in cluster.toml may have changed since, the run's folders have not moved."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from homelab.controller.base.errors import HomelabError
from homelab.controller.remote.fanout import Fleet
from homelab.shared.protocol.run_requests import PollRequest

GONE = "it is not in cluster.toml"


ALL_LINES = 1 << 60
"""More metrics than any rank has: a question that wants none."""


def poll_request(
    run: str,
    *,
    tail_lines: int = 0,
    torchrun_lines: int = 60,
    attempt: int | None = None,
    known_lines: Mapping[int, int] | Mapping[str, int] | None = None,
) -> PollRequest:
    """The question `poll` of a run, about `attempt` (default: the newest a node knows). `known_lines`: rank -> metrics that are not sent again."""
    after_lines = {str(rank): count for rank, count in (known_lines or {}).items()}
    return PollRequest(run=run, tail_lines=tail_lines, torchrun_lines=torchrun_lines, after_lines=after_lines, attempt=attempt)


def poll(
    fleet: Fleet, request: PollRequest, planned: Collection[str], *, timeout_s: float = 20.0
) -> tuple[dict[str, dict[str, Any]], dict[str, str], dict[str, str]]:
    """`poll` of the nodes `planned`: the answers, why there is none and what would bring one, by the names that the nodes have in the run.

    An answer's own "node" is its name of today. The other nodes of the cluster are asked only where one of `planned` is not to be found by
    its name.
    """
    everybody = [node.name for node in fleet.cluster.nodes]
    in_cluster = [name for name in planned if name in everybody]
    answers, errors = fleet.ask("poll", request, names=in_cluster, timeout_s=timeout_s)
    if len(in_cluster) < len(set(planned)) or any(_part(answer, name) != name for name, answer in answers.items()):
        more, _ = fleet.ask("poll", request, names=[name for name in everybody if name not in in_cluster], timeout_s=timeout_s)
        answers = {**answers, **more}
    answer_of, silent = sorted_out(answers, errors, planned)
    return answer_of, silent, {name: error.hint for name, error in errors.items() if name in silent and error.hint}


def sorted_out(
    answers: Mapping[str, dict[str, Any]], errors: Mapping[str, HomelabError], planned: Collection[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The pure part of `poll`. A machine that has taken part under another name does not speak for the name it has today."""
    answer_of: dict[str, dict[str, Any]] = {}
    for name, answer in answers.items():
        part = _part(answer, name)
        if part in planned and (part == name or part not in answer_of):
            answer_of[part] = answer
    silent = {name: errors[name].message for name in planned if name in errors and name not in answer_of}
    silent |= {
        name: f"another machine has its name now (here it was {_part(answers[name], name)})"
        for name in planned
        if name in answers and name not in answer_of
    }
    silent |= {name: GONE for name in planned if name not in answer_of and name not in silent}
    return answer_of, silent


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
    errors_of: dict[str, HomelabError] = {}
    for name, host in planned.items():
        if name in looked_at:
            continue
        if name in errors:
            errors_of[name] = errors[name]
        elif name not in stopped:
            errors_of[name] = HomelabError(f"{GONE} any more", where=f"node {name}", hint="add it to cluster.toml, then run stop again")
        elif stopped[name].get("as_nodes"):
            took = ", ".join(stopped[name]["as_nodes"])
            errors_of[name] = HomelabError(
                f"the machine with its name now was {took} in this run, and no other machine knows {name}", where=f"node {name}",
                hint="add the former machine to cluster.toml, then run stop again",
            )  # fmt: skip
        elif host and host != hosts.get(name):
            errors_of[name] = HomelabError(
                f"its address was {host} at the launch, and the machine at {hosts.get(name)} does not know this run", where=f"node {name}",
                hint=f"give a node the address {host} in cluster.toml, then run stop again",
            )  # fmt: skip
    return errors_of
