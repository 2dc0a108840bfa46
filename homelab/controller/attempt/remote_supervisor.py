"""A run's supervisor on its head node instead of this machine, for controllers that sleep: tried first, then put there and started.

Nothing secret leaves this machine: the head logs in to the other nodes with its own key, and is given the host keys that were
accepted here. (What happens on the node: `homelab.node.run.supervisor_host`.)
"""

from __future__ import annotations

import getpass
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Command, Hint, chain, homelab
from homelab.controller.base.node_words import advice
from homelab.controller.base.say import Say
from homelab.controller.base.units import listed
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.config.load import cluster_text
from homelab.controller.facts.node_commands import create_environment, environment_of, on_node, pip_install
from homelab.controller.facts.reading import read
from homelab.controller.planning.types import Plan
from homelab.controller.remote import hostkeys, ship
from homelab.controller.remote.fanout import Fleet
from homelab.controller.remote.ssh_login import resolve
from homelab.controller.run import leave_folder, run_folder, store
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.request import RunRequest
from homelab.shared.protocol.run_messages import SupervisorReply
from homelab.shared.protocol.supervisor_messages import EndRequest, NeedsRequest, PlaceRequest

# The controller's packages in pyproject.toml, without tomlkit and PyYAML: only a person's own machine writes TOML and exports.
PACKAGES = ("typer>=0.29", "rich>=13.9", "fabric>=3.2", "paramiko>=3.5", "pydantic>=2.14", "psutil>=6.1")
OLDEST_PYTHON = (3, 11)
KNOWN_HOSTS = "known_hosts"
END_GRACE_S = 20.0
# Files of a supervisor on this machine, and files that a supervisor collects again by itself.
_NOT_SENT = ("supervisor.json", "supervisor.lock", "supervisor.log", "supervised.json", "metrics.jsonl", ".metrics.lock")
_NOT_SENT_FOLDER = "tracking/"  # of this machine's forwarder
_KEY = "~/.ssh/id_ed25519"


@dataclass(frozen=True)
class SupervisorPlace:
    """A node on which a run's supervisor can be started: everything was tried."""

    node: str
    run: str

    def request(self, fleet: Fleet) -> PlaceRequest:
        """What every question about it names."""
        return PlaceRequest(run=self.run, code=_code_dir(fleet.cluster.node(self.node)))


@dataclass(frozen=True)
class SupervisorRequest:
    """What a supervisor on `head` is to look after. `nodes`: that the run may use; those that are `silent` need not be reached now.

    `addresses`: of nodes on the LAN, as far as they are known.
    """

    run: str
    head: str
    nodes: Collection[str]
    addresses: Mapping[str, str]
    silent: Collection[str] = ()

    @classmethod
    def of(cls, plan: Plan) -> SupervisorRequest:
        """For a run that starts with this plan."""
        addresses = {node.name: node.lan_address for node in plan.nodes}
        return cls(plan.run, plan.head, list(addresses), addresses)


def prepare(fleet: Fleet, request: SupervisorRequest, say: Say) -> SupervisorPlace:
    """Make sure that a supervisor on the head can look after the nodes. Its program and what it must know of the others lie there afterwards;
    nothing runs. Raises HomelabError with the command that fixes what is in the way.
    """
    place, node, agent = SupervisorPlace(request.head, request.run), fleet.cluster.node(request.head), fleet.agent(request.head)
    say(f"asking {request.head} whether the supervisor can run there")
    _refuse_lacking(node, agent.ask("supervisor-needs", NeedsRequest(packages=tuple(package.split(">=")[0] for package in PACKAGES))))
    remote_cluster = seen_from(fleet.cluster.only(tuple(request.nodes)), request.head, request.addresses)
    of_cluster = {"cluster.toml": cluster_text(remote_cluster).encode(), KNOWN_HOSTS: host_keys(fleet.cluster, remote_cluster).encode()}
    try:
        agent.unpack(_code_dir(node), ship.PACKAGE.archive())
        agent.send("supervisor-put", place.request(fleet), ship.tar(of_cluster, mode=0o600))
        say(f"testing the connections from {request.head} to the other nodes")
        errors = agent.ask("supervisor-reach", place.request(fleet), timeout_s=90.0)["errors"]
        must_answer = set(request.nodes) - set(request.silent)
        _refuse_unreached(fleet.cluster, node, {name: error for name, error in errors.items() if name in must_answer})
    except BaseException:
        discard(fleet, place)
        raise
    return place


def discard(fleet: Fleet, place: SupervisorPlace) -> None:
    """Take away what `prepare` has put there: the run did not start."""
    fleet.ask("supervisor-discard", place.request(fleet), names=[place.node])


def start(fleet: Fleet, paths: RunPaths, place: SupervisorPlace, say: Say) -> str:
    """Give it the run's folder, start it, and wait until it is at work; where its log lies. Raises HomelabError; the run goes on."""
    say(f"starting the supervisor on {place.node}")
    agent, request = fleet.agent(place.node), place.request(fleet)
    try:
        agent.send("supervisor-put", request, ship.tar(_folder_of(paths), mode=0o600))
        store.write_json(paths.supervised_json, {"node": place.node})  # first: one that starts and is not known of would be worse
        return str(agent.ask("supervisor-start", request, timeout_s=60.0)["log"])
    except HomelabError as error:
        raise HomelabError(
            f"the supervisor did not start on {place.node}: {error.message}", where=error.where,
            hint=Hint("the run continues without it; to start one from here: {}, and after a failure: {}", homelab("supervise", paths.name), homelab("recover", paths.name)),
        ) from error  # fmt: skip


def look(fleet: Fleet, paths: RunPaths) -> dict[str, SupervisorReply]:
    """What there is of a supervisor on the nodes that may have it and that answer."""
    answers, _ = fleet.ask("supervisor-look", RunRequest(run=paths.name), names=places_of(fleet.cluster, paths))
    return {name: read(SupervisorReply, answer["supervisor"]) for name, answer in answers.items() if answer["supervisor"]}


def at_work(fleet: Fleet, paths: RunPaths) -> tuple[str, SupervisorReply] | None:
    """The node that has the run's supervisor, and what that is doing; None where none answers. Asked only of where one may be."""
    return next(((name, reply) for name, reply in look(fleet, paths).items() if reply.alive), None)


def end(fleet: Fleet, paths: RunPaths, say: Say) -> None:
    """End it, before the run itself is stopped: it would take the stop for a failure, or be in the middle of a recovery."""
    if at_work(fleet, paths) is None:
        return
    say(f"ending the supervisor of {paths.name}")
    fleet.ask(
        "supervisor-end",
        EndRequest(run=paths.name, grace_s=END_GRACE_S),
        names=places_of(fleet.cluster, paths),
        timeout_s=END_GRACE_S + 20.0,
    )


def places_of(cluster: Cluster, paths: RunPaths) -> list[str]:
    """The nodes that may have it: the one that was written down, and every head the run has had (it may have been launched elsewhere)."""
    node_names = {node.name for node in cluster.nodes}
    return [name for name in dict.fromkeys([recorded(paths), *run_folder.heads(paths)]) if name in node_names]


def recorded(paths: RunPaths) -> str:
    """The node that this machine has put the supervisor on; empty where it has not."""
    return str(store.read_object(paths.supervised_json).get("node", ""))


def seen_from(cluster: Cluster, head: str, addresses: Mapping[str, str]) -> Cluster:
    """The cluster as it is from the head: LAN addresses, users and ports as this machine resolves them, and no key of this machine."""
    nodes = []
    for node in cluster.nodes:
        lan = node.lan_address or addresses.get(node.name)
        changes: dict[str, Any] = {"identity_file": None, "lan_address": lan}
        if node.name == head:
            changes |= {"host": "local", "port": 22, "user": None}
        elif node.host == "local":
            changes |= {"host": lan or node.host, "user": getpass.getuser()}
        else:
            way = resolve(node)
            changes |= {"host": lan or way.host, "port": way.port, "user": way.user}
        nodes.append(node.model_copy(update=changes))
    return cluster.model_copy(update={"nodes": tuple(nodes), "known_hosts": KNOWN_HOSTS, "left_out": ()})


def host_keys(cluster: Cluster, remote_cluster: Cluster) -> str:
    """Lines of a known_hosts file: the keys that were accepted here, under the names the head will use. Raises HomelabError for a node without."""
    lines = []
    for node in remote_cluster.nodes:
        if node.host != "local":
            name = hostkeys.name_in_file(node.host, node.port)
            keys = _keys_of(cluster, cluster.node(node.name))
            if not keys:
                raise HomelabError(
                    "the host key of this node is not known here, so homelab cannot tell the head which key to trust", where=f"node {node.name}",
                    hint=homelab("trust", node.name),
                )  # fmt: skip
            lines += [f"{name} {key}" for key in keys]
    return "".join(f"{line}\n" for line in lines)


def _keys_of(cluster: Cluster, node: Node) -> list[str]:
    """Kind and key in base64, of all that are known of a node."""
    # known_hosts rarely has the key of this machine itself; its sshd keeps it in a readable file (sshd_config(5), HostKey)
    if node.host == "local":
        texts = [file.read_text(encoding="utf-8", errors="replace").split() for file in sorted(Path("/etc/ssh").glob("ssh_host_*_key.pub"))]
        return [" ".join(words[:2]) for words in texts if len(words) >= 2]
    return [f"{kind} {key.get_base64()}" for kind, key in resolve(node).recorded(cluster).items()]


def _refuse_lacking(node: Node, has: dict[str, Any]) -> None:
    oldest = ".".join(map(str, OLDEST_PYTHON))
    if tuple(has["version"][:2]) < OLDEST_PYTHON:
        raise HomelabError(
            f"a supervisor needs Python {oldest} or newer, and this node has {'.'.join(map(str, has['version']))}",
            where=f"node {node.name}, {has['python']}",
            hint=f"{create_environment(node, PACKAGES, f'python{oldest}')}; or keep it on this machine: --supervise here",
        )
    if problems := {package: problem for package in PACKAGES if (problem := _what_lacks(package, has["packages"]))}:
        fix = pip_install(node, problems) if environment_of(node) else create_environment(node, problems)
        raise HomelabError(
            f"a supervisor needs {listed(problems)}; the Python of this node has {listed(problems.values())}",
            where=f"node {node.name}, {has['python']}", hint=f"{fix}; or keep it on this machine: --supervise here",
        )  # fmt: skip


def _what_lacks(package: str, versions: Mapping[str, str]) -> str:
    """What is wrong with the installed version of "NAME>=VERSION"; empty: nothing."""
    name, _, least = package.partition(">=")
    if name not in versions:
        return f"{name} is not installed"
    numbers = [[int(number) for number in re.findall(r"\d+", version)[:2]] for version in (versions[name], least)]
    return f"{name} is {versions[name]}" if numbers[0] < numbers[1] else ""


def _refuse_unreached(cluster: Cluster, head: Node, errors: Mapping[str, Mapping[str, Any] | None]) -> None:
    closed = {name: error for name, error in errors.items() if error is not None}
    if not closed:
        return
    name, first = next(iter(closed.items()))
    refused = [cluster.node(other) for other, error in closed.items() if error["is_login"]]
    raise HomelabError(
        f"{head.name} does not reach {listed(closed)}, so a supervisor there could not watch {'it' if len(closed) == 1 else 'them'}: {first['message']}",
        where=f"from node {head.name} to {name}: {first['where']}",
        hint=Hint(
            "{}; or keep it on this machine: --supervise here", _authorise(head, refused) if refused else advice(head.name, first["hint"])
        ),
    )


def _authorise(head: Node, others: list[Node]) -> Command:
    """The command that makes a key on the head where it has none, and adds its public half on the others, with the access that we have."""
    steps = [on_node(head, f"test -f {_KEY} || ssh-keygen -q -t ed25519 -N {shlex.quote('')} -f {_KEY}")]
    show, keep = on_node(head, f"cat {_KEY}.pub"), "mkdir -p -m 700 ~/.ssh && cat >> ~/.ssh/authorized_keys"
    steps += [Command(f"{show} | {f'({keep})' if other.host == 'local' else on_node(other, keep)}") for other in others]
    return chain(*steps)


def _code_dir(node: Node) -> str:
    return f"{node.workdir}/code/{ship.PACKAGE.content_hash()}"


def _folder_of(paths: RunPaths) -> dict[str, bytes]:
    """The run's folder without what is this machine's own, and without data files: those were shipped to the nodes. Beside it, who wants which node."""
    described = store.read_object(paths.run_json).get("data") or {}
    entries = [entry for entry in described.values() if entry and entry.get("sent") == "shipped"]
    shipped = {f"code/{folder}{one.get('inside') or one['name']}" for one in entries for folder in ("", f"{one.get('sha256')}/")}
    content_of = {}
    for file in sorted(paths.root.rglob("*")):
        name = str(file.relative_to(paths.root))
        if (
            file.is_file()
            and not file.is_symlink()
            and name not in (*_NOT_SENT, *shipped)
            and not name.startswith(_NOT_SENT_FOLDER)
            and ".partial." not in name
        ):
            content_of[f"runs/{paths.name}/{name}"] = file.read_bytes()
    # As they are here now: a supervisor that was there before may have been told of one that has come back since.
    for file in (paths.root.parent / leave_folder.NAME).glob("*.json"):
        content_of[f"runs/{leave_folder.NAME}/{file.name}"] = file.read_bytes()
    return content_of
