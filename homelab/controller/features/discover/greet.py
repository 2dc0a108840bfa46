"""What the SSH server of each candidate shows before any login: its address, its host key, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from homelab.controller.base.errors import HomelabError
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.features.discover.candidates import Candidate, Greeting, is_forge
from homelab.controller.remote import hostkeys, ssh_login
from homelab.controller.remote.fanout import on_all


@dataclass(frozen=True)
class Greeted:
    """`greetings` in the order of the nodes; `keys` and `errors` by the node's name; `remembered`: of those with an error, the fingerprints that were accepted once."""

    greetings: dict[str, Greeting]
    keys: dict[str, ssh_login.HostKey]
    errors: dict[str, HomelabError]
    remembered: dict[str, frozenset[str]]


def greet(cluster: Cluster, candidates: Mapping[str, Candidate]) -> Greeted:
    """Ask the server of every candidate, by the name of its node in `cluster`, for its host key. Git forges are not asked, and not in the answer."""
    addresses, unread = on_all(candidates, lambda name: ssh_login.resolve(cluster.node(name)))
    addresses |= {name: _as_written(cluster.node(name)) for name in unread}
    asked = [name for name, address in addresses.items() if not is_forge(address.host, address.user)]

    def one(name: str) -> ssh_login.HostKey:
        return ssh_login.offered_key(cluster, cluster.node(name))

    keys, errors = on_all([name for name in asked if name not in unread], one)
    errors |= unread
    greetings = {name: _greeting(candidates[name], addresses[name], keys.get(name), errors.get(name)) for name in asked}
    remembered = {name: frozenset(hostkeys.fingerprint(key) for key in addresses[name].recorded(cluster).values()) for name in errors}
    return Greeted(greetings, keys, errors, remembered)


def _as_written(node: Node) -> ssh_login.Address:
    """Of a host that OpenSSH cannot resolve, because it refuses its configuration."""
    return ssh_login.Address(node.host, node.port, node.user, (), None, node.host)


def _greeting(candidate: Candidate, address: ssh_login.Address, key: ssh_login.HostKey | None, error: HomelabError | None) -> Greeting:
    fingerprint = hostkeys.fingerprint(key.key) if key else ""
    return Greeting(candidate, address.host, address.port, address.user, fingerprint, error.message if error else "")


def own_fingerprints(lines: list[str]) -> set[str]:
    """Of public host keys, "ssh-ed25519 AAAA...", as the greetings have them."""
    return {hostkeys.fingerprint(key) for line in lines if (key := hostkeys.key_of(line)) is not None}


def as_candidate(node: Node) -> Candidate:
    """A node that cluster.toml has already."""
    return Candidate(node.host, "cluster.toml", name=node.name, user=node.user, port=node.port)
