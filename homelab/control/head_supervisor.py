"""A run's supervisor on its head node instead of this machine, for controllers that sleep: tried first, then put there and started.

Nothing secret leaves this machine: the head logs in to the other nodes with its own key, and is given the host keys that were
accepted here. (What happens on the node: `homelab.node.supervisor`.)
"""

from __future__ import annotations

import contextlib
import getpass
import io
import shlex
import tarfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homelab.checks.commands import create_environment, environment_of, listed, on_node, pip_install
from homelab.config.cluster import Cluster, Node
from homelab.config.write import cluster_text
from homelab.control import find
from homelab.errors import HomelabError
from homelab.remote import hostkeys, ship
from homelab.remote.connect import resolve
from homelab.remote.fanout import Fleet
from homelab.runs import store
from homelab.runs.paths import RunPaths
from homelab.runs.reply import SupervisorReply

Say = Callable[[str], None]
# What pyproject.toml names for the controller; the head becomes one.
PACKAGES = ("typer>=0.29", "rich>=13.9", "fabric>=3.2", "paramiko>=3.5", "pydantic>=2.10", "humanize>=4.11")
OLDEST_PYTHON = (3, 11)
KNOWN_HOSTS = "known_hosts"
END_GRACE_S = 20.0
# What belongs to a supervisor on this machine, and what a supervisor gathers again by itself.
_NOT_SENT = ("supervisor.json", "supervisor.lock", "supervisor.log", "supervised.json", "metrics.jsonl", ".metrics.lock")
_KEY = "~/.ssh/id_ed25519"


@dataclass(frozen=True)
class Place:
    """A node on which a run's supervisor can be started: everything was tried."""

    node: str
    run: str

    def request(self, fleet: Fleet) -> dict[str, Any]:
        """What every question about it names."""
        return {"run": self.run, "code": _code_dir(fleet.cluster.node(self.node))}


def prepare(
    fleet: Fleet, run: str, head: str, nodes: Collection[str], addresses: Mapping[str, str], say: Say, silent: Collection[str] = ()
) -> Place:
    """Make sure that a supervisor on `head` can look after `nodes`; `addresses` are those on the LAN, as far as they are known.

    Those of them that are `silent` now need not be reached; they may come back. Its program and what it must know of the others lie
    there afterwards; nothing runs. Raises HomelabError with the command that mends what is in the way.
    """
    place, node, agent = Place(head, run), fleet.cluster.node(head), fleet.agent(head)
    say(f"asking {head} whether the supervisor can run there")
    _refuse_lacking(node, agent.ask("supervisor-needs", {"packages": [package.split(">=")[0] for package in PACKAGES]}))
    there = seen_from(fleet.cluster.only(tuple(nodes)), head, addresses)
    keys = host_keys(fleet.cluster, there)
    try:
        agent.unpack(_code_dir(node), ship.package()[1])
        agent.send("supervisor-put", place.request(fleet), _tar({"cluster.toml": cluster_text(there).encode(), KNOWN_HOSTS: keys.encode()}))
        say(f"trying the ways from {head} to the other nodes")
        errors = agent.ask("supervisor-reach", place.request(fleet), timeout_s=90.0)["errors"]
        _refuse_unreached(fleet.cluster, node, {name: error for name, error in errors.items() if name in nodes and name not in silent})
    except BaseException:
        discard(fleet, place)
        raise
    return place


def discard(fleet: Fleet, place: Place) -> None:
    """Take away what `prepare` has put there: the run did not start."""
    fleet.ask("supervisor-discard", place.request(fleet), names=[place.node])


def start(fleet: Fleet, paths: RunPaths, place: Place, say: Say) -> str:
    """Give it the run's folder, start it, and wait until it is at work; where its log lies. Raises HomelabError; the run goes on."""
    say(f"starting the supervisor on {place.node}")
    agent, request = fleet.agent(place.node), place.request(fleet)
    try:
        agent.send("supervisor-put", request, _tar(_folder_of(paths)))
        store.write_json(paths.supervised_json, {"node": place.node})  # first: one that starts and is not known of would be worse
        return str(agent.ask("supervisor-start", request, timeout_s=60.0)["log"])
    except HomelabError as error:
        raise HomelabError(
            f"the supervisor did not start on {place.node}: {error.message}", where=error.where,
            hint=f"the run goes on without it; from here: homelab supervise {paths.name}, and after a failure: homelab recover {paths.name}",
        ) from error  # fmt: skip


def look(fleet: Fleet, paths: RunPaths) -> dict[str, SupervisorReply]:
    """What there is of a supervisor on the nodes that may have it and that answer."""
    answers, _ = fleet.ask("supervisor-look", {"run": paths.name}, names=places_of(fleet.cluster, paths))
    return {name: SupervisorReply.model_validate(answer["supervisor"]) for name, answer in answers.items() if answer["supervisor"]}


def at_work(fleet: Fleet, paths: RunPaths) -> tuple[str, SupervisorReply] | None:
    """The node that has the run's supervisor, and what that is doing; None where none answers. Asked only of where one may be."""
    return next(((name, reply) for name, reply in look(fleet, paths).items() if reply.alive), None)


def end(fleet: Fleet, paths: RunPaths, say: Say) -> None:
    """End it, before the run itself is stopped: it would take the stop for a failure, or be in the middle of a recovery."""
    if at_work(fleet, paths) is None:
        return
    say(f"ending the supervisor of {paths.name}")
    fleet.ask("supervisor-end", {"run": paths.name, "grace_s": END_GRACE_S}, names=places_of(fleet.cluster, paths), timeout_s=END_GRACE_S + 20.0)


def places_of(cluster: Cluster, paths: RunPaths) -> list[str]:
    """The nodes that may have it: the one that was written down, and every head the run has had (it may have been launched elsewhere)."""
    known = {node.name for node in cluster.nodes}
    heads = []
    for number in find.attempts(paths):
        with contextlib.suppress(HomelabError):  # a plan that cannot be read names nobody
            heads.append(find.plan_of(paths, number).head)
    return [name for name in dict.fromkeys([recorded(paths), *heads]) if name in known]


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


def host_keys(cluster: Cluster, there: Cluster) -> str:
    """Lines of a known_hosts file: the keys that were accepted here, under the names the head will use. Raises HomelabError for a node without."""
    lines = []
    for node in there.nodes:
        if node.host != "local":
            name = hostkeys.name_in_file(node.host, node.port)
            keys = _keys_of(cluster, cluster.node(node.name))
            if not keys:
                raise HomelabError(
                    "the host key of this node is not known here, so the head cannot be told which one to trust", where=f"node {node.name}",
                    hint=f"homelab trust {node.name}",
                )  # fmt: skip
            lines += [f"{name} {key}" for key in keys]
    return "".join(f"{line}\n" for line in lines)


def _keys_of(cluster: Cluster, node: Node) -> list[str]:
    """Kind and key in base64, of all that are known of a node."""
    if node.host == "local":  # nobody accepts the key of his own machine; its sshd keeps it where everybody may read it (sshd_config(5), HostKey)
        texts = [file.read_text(encoding="utf-8", errors="replace").split() for file in sorted(Path("/etc/ssh").glob("ssh_host_*_key.pub"))]
        return [" ".join(words[:2]) for words in texts if len(words) >= 2]
    way = resolve(node)
    found = hostkeys.known(cluster).lookup(hostkeys.name_in_file(way.host, way.port)) or {}
    return [f"{kind} {key.get_base64()}" for kind, key in found.items()]


def _refuse_lacking(node: Node, has: dict[str, Any]) -> None:
    oldest = ".".join(map(str, OLDEST_PYTHON))
    if tuple(has["version"][:2]) < OLDEST_PYTHON:
        raise HomelabError(
            f"a supervisor needs Python {oldest} or newer, and this node has {'.'.join(map(str, has['version']))}",
            where=f"node {node.name}, {has['python']}",
            hint=f"{create_environment(node, PACKAGES, f'python{oldest}')}; or leave it on this machine: --supervise here",
        )
    if has["missing"]:
        lacking = [package for package in PACKAGES if package.split(">=")[0] in has["missing"]]
        mend = pip_install(node, lacking) if environment_of(node) else create_environment(node, lacking)
        raise HomelabError(
            f"a supervisor needs {listed(has['missing'])}, which {'is' if len(lacking) == 1 else 'are'} not installed in the Python of this node",
            where=f"node {node.name}, {has['python']}", hint=f"{mend}; or leave it on this machine: --supervise here",
        )  # fmt: skip


def _refuse_unreached(cluster: Cluster, head: Node, errors: Mapping[str, Mapping[str, Any] | None]) -> None:
    closed = {name: error for name, error in errors.items() if error is not None}
    if not closed:
        return
    name, first = next(iter(closed.items()))
    refused = [cluster.node(other) for other, error in closed.items() if error["is_login"]]
    raise HomelabError(
        f"{head.name} does not reach {listed(closed)}, so a supervisor there could not look after {'it' if len(closed) == 1 else 'them'}: {first['message']}",
        where=f"from node {head.name} to {name}: {first['where']}",
        hint=f"{_authorise(head, refused) if refused else first['hint']}; or leave it on this machine: --supervise here",
    )


def _authorise(head: Node, others: list[Node]) -> str:
    """The command that makes a key on the head where it has none, and adds its public half on the others, with the access that we have."""
    words = [on_node(head, f"test -f {_KEY} || ssh-keygen -q -t ed25519 -N {shlex.quote('')} -f {_KEY}")]
    show, keep = on_node(head, f"cat {_KEY}.pub"), "mkdir -p -m 700 ~/.ssh && cat >> ~/.ssh/authorized_keys"
    words += [f"{show} | {f'({keep})' if other.host == 'local' else on_node(other, keep)}" for other in others]
    return " && ".join(words)


def _code_dir(node: Node) -> str:
    return f"{node.workdir}/code/{ship.package()[0]}"


def _folder_of(paths: RunPaths) -> dict[str, bytes]:
    """The run's folder without what is this machine's own, and without data files: those were shipped to the nodes."""
    described = store.read_object(paths.run_json).get("data") or {}
    shipped = {f"code/{entry.get('inside') or entry['name']}" for entry in described.values() if entry and entry.get("sent") == "shipped"}
    found = {}
    for file in sorted(paths.root.rglob("*")):
        name = str(file.relative_to(paths.root))
        if file.is_file() and name not in (*_NOT_SENT, *shipped) and ".partial." not in name:
            found[f"runs/{paths.name}/{name}"] = file.read_bytes()
    return found


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o600
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
