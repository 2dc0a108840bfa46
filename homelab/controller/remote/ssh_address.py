"""The address of a node as `ssh HOST` would use it, and which of ssh_config's keys are left to OpenSSH itself."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import paramiko

from homelab.controller.base.errors import UnreachableError
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.remote import hostkeys, login_errors, ssh_keys, ssh_route, ssh_settings


@dataclass(frozen=True)
class Address:
    """Where and as whom to log in, after ssh_config had its say. `settings`: all that `ssh -G` says; empty where no ssh is installed."""

    host: str
    port: int
    user: str | None
    identity_files: tuple[str, ...]
    proxy_jump: str | None
    known_as: str
    settings: ssh_settings.Settings = field(default_factory=dict)
    beyond_paramiko: tuple[str, ...] = ()
    """The keys that OpenSSH itself must obey (`homelab.controller.remote.ssh_keys`)."""
    not_supported: tuple[str, ...] = ()
    """Keys that might let `ssh HOST` in, and that are not obeyed, each with the reason."""
    without_effect: tuple[str, ...] = ()
    """Keys that were set for something on the node, and that are not obeyed, with the reason."""

    @property
    def hops(self) -> tuple[ssh_route.Hop, ...]:
        """The machines on the way."""
        return ssh_route.hops_of(self.proxy_jump or "none")

    @property
    def name_in_known_hosts(self) -> str:
        """An alias stands there without the port (ssh_config(5), HostKeyAlias)."""
        return self.known_as if self.known_as != self.host else hostkeys.name_in_file(self.host, self.port)

    @property
    def known_hosts(self) -> tuple[str, ...]:
        """The person's own known_hosts files, where ssh_config names some; cluster.toml's known_hosts wins over them."""
        return ssh_route.known_hosts_files(self.settings) if "userknownhostsfile" in self.beyond_paramiko else ()

    def recorded(self, cluster: Cluster) -> Mapping[str, paramiko.PKey]:
        """Kind -> host key, of those that were accepted here."""
        return hostkeys.known(cluster, self.known_hosts).lookup(self.name_in_known_hosts) or {}

    def where(self, node: Node) -> str:
        """The node and its place, for errors."""
        return f"node {node.name} ({f'{self.user}@' if self.user else ''}{self.host}:{self.port})"


def resolve(node: Node) -> Address:
    """The address of a node as `ssh HOST` would use it; cluster.toml's keys win over ssh_config's. Raises UnreachableError where OpenSSH refuses its files."""
    return address_of(node, ssh_settings.of(node))


def address_of(node: Node, options: ssh_settings.Settings) -> Address:
    """The same, of the answer of `ssh -G`."""
    host = options.get("hostname", [node.host])[0]
    port = node.port if node.port != 22 else int(options.get("port", ["22"])[0])
    identities = (node.identity_file,) if node.identity_file else tuple(options.get("identityfile", ()))
    jump = options.get("proxyjump", ["none"])[0]
    user, known_as = node.user or options.get("user", [None])[0], options.get("hostkeyalias", [host])[0] or host
    files = tuple(os.path.expanduser(name) for name in identities)
    defaults = ssh_settings.defaults(node) if options else {}
    answered = ("userknownhostsfile", "globalknownhostsfile", "knownhostscommand", "verifyhostkeydns") if node.known_hosts else ()
    beyond = ssh_keys.beyond_paramiko(options, defaults, instead=(*answered, *(("identityfile",) if node.identity_file else ())))
    return Address(
        host,
        port,
        user,
        files,
        None if jump in ("none", "") else jump,
        known_as,
        options,
        beyond,
        tuple(ssh_keys.refused(options, defaults)),
        tuple(ssh_keys.without_effect(options, defaults)),
    )


def refuse_missing_key(node: Node, where: str) -> None:
    """Raises UnreachableError where cluster.toml names a key that is not there."""
    if node.identity_file and not os.path.exists(os.path.expanduser(node.identity_file)):
        raise UnreachableError(
            f"the identity file {node.identity_file} does not exist",
            where=f"{where}, key identity_file",
            hint=f"edit cluster.toml, node {node.name}: identity_file = ...; or make a key: ssh-keygen -t ed25519 -f {shlex.quote(node.identity_file)}",
        )


def as_login(cluster: Cluster, node: Node, address: Address, where: str) -> login_errors.Login:
    """What the errors of a login need to know."""
    known_as = address.known_as if address.known_as != address.host else ""
    keys = existing_keys(address)
    return login_errors.Login(cluster, node, address.host, address.port, address.user, keys, where, known_as, address.known_hosts)


def existing_keys(address: Address) -> tuple[str, ...]:
    """The identity files that are there."""
    return tuple(name for name in address.identity_files if Path(name).exists())
