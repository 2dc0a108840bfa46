"""Misconfigurations that make a node unreachable or its login useless: power, keys, account, shell, Python."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from homelab.lab import faults, lab_files, sshd
from homelab.lab.lab import Lab
from scripts.practice.misconfigurations.misconfiguration import Inject, add, misconfiguration
from scripts.practice.misconfigurations.node_changes import cluster_says, edited, own_folder, restart_sshd, says


def _fault(fault_name: str) -> Inject:
    """A run-time fault, and what undoes it."""

    @contextlib.contextmanager
    def inject(lab: Lab, node: str) -> Iterator[None]:
        lab.fault(node, fault_name)
        try:
            yield
        finally:
            lab.fault(node, faults.UNDONE_BY[fault_name])

    return inject


add("no-power", "the node is off", "ssh.login", inject=_fault("power-cut"), namespaces=False)
add("cable-pulled", "the node's cable is pulled", "ssh.login", inject=_fault("pull-cable"))
# As on a machine that swaps too much: the kernel accepts connections, no program answers.
add("frozen", "the node's processes are stopped, its connections stay open", "ssh.login", inject=_fault("freeze"), namespaces=False)
add("no-sshd", "no program listens on the node's SSH port", "ssh.login", inject=says(port="22022"), namespaces=False)


@misconfiguration("host-key-changed", "the node's host key is not the known one", "ssh.login")
def host_key_changed(lab: Lab, node: str) -> Iterator[None]:
    """As after the machine was installed again."""
    folder = lab.state.node_folder(lab.state.node(node))
    names = ("host_key", "host_key.pub")
    kept = {name: (folder / name).read_bytes() for name in names}
    try:
        for name in names:
            (folder / name).unlink()
        sshd.make_key(folder / "host_key", "another machine")
        restart_sshd(lab, node)
        yield
    finally:
        for name, content in kept.items():
            (folder / name).write_bytes(content)
        restart_sshd(lab, node)


@misconfiguration("host-key-unknown", "the node's host key was never accepted", "ssh.login", namespaces=False)
def host_key_unknown(lab: Lab, node: str) -> Iterator[None]:
    """As with a new node."""
    name = sshd.known_hosts_line(lab.state.node(node).host, lab.state.node(node).port, "").split()[0]
    with edited(
        lab.folder / lab_files.KNOWN_HOSTS_FILE,
        lambda text: "".join(line for line in text.splitlines(keepends=True) if line.split()[0] != name),
    ):
        yield


@misconfiguration("key-refused", "the node does not know the controller's key", "ssh.login", namespaces=False)
def key_refused(lab: Lab, node: str) -> Iterator[None]:
    """As without `ssh-copy-id`."""
    with edited(lab.state.node_folder(lab.state.node(node)) / "authorized_keys", lambda text: ""):
        yield


@misconfiguration("wrong-key", "cluster.toml names another key than the node's", "ssh.login", namespaces=False)
def wrong_key(lab: Lab, node: str) -> Iterator[None]:
    """A key that exists, for another machine."""
    with own_folder(lab, node) as folder:
        sshd.make_key(folder / "id_ed25519", "for another machine")
        with cluster_says(lab, node, identity_file=f'"{folder / "id_ed25519"}"'):
            yield


add(
    "key-missing", "the key that cluster.toml names does not exist", "ssh.login",
    inject=says(identity_file='"keys/id_rsa_of_the_old_laptop"'), namespaces=False,
)  # fmt: skip
add("wrong-user", "cluster.toml names an account that may not log in", "ssh.login", inject=says(user='"nobody"'), namespaces=False)


@contextlib.contextmanager
def shell(lab: Lab, node: str, script: str) -> Iterator[None]:
    """The account's login shell is this program."""
    lab_node = lab.state.node(node)
    with own_folder(lab, node) as folder:
        file = folder / "shell"
        file.write_text(script)
        file.chmod(0o755)
        passwd = lab.state.node_folder(lab_node) / "etc" / "passwd"
        with edited(passwd, lambda text: re.sub(rf"(?m)^({re.escape(lab_node.user)}:.*):[^:\n]*$", rf"\1:{file}", text)):
            yield


def _login_shell(script: str) -> Inject:
    return lambda lab, node: shell(lab, node, script)


# As /usr/sbin/nologin.
add(
    "no-shell", "the account's shell prints a sentence and ends", "ssh.login",
    inject=_login_shell("#!/bin/sh\necho 'This account is currently not available.'\nexit 1\n"),
)  # fmt: skip
# As on a storage box with a menu: it prints, reads a line, and ends with exit code 0.
add(
    "menu-shell", "the account's shell asks a question instead of running commands", "ssh.login",
    inject=_login_shell("#!/bin/sh\nprintf '\\033[1m1) Status  2) Reboot\\033[0m\\n> '\nread -r answer\necho bye\nexit 0\n"),
)  # fmt: skip


@misconfiguration("slow-login", "the first login takes 16 seconds", "ssh.slow")
def slow_login(lab: Lab, node: str) -> Iterator[None]:
    """As with a home on a disk that has to spin up."""
    with own_folder(lab, node) as folder:
        script = f'#!/bin/sh\nmkdir {folder}/woken 2>/dev/null && sleep 16\nexec /bin/sh "$@"\n'
        with shell(lab, node, script):
            yield


def _python(script: str) -> Inject:
    """cluster.toml names this program as the node's Python."""

    @contextlib.contextmanager
    def inject(lab: Lab, node: str) -> Iterator[None]:
        with own_folder(lab, node) as folder:
            file = folder / "python"
            file.write_text(script)
            file.chmod(0o755)
            with cluster_says(lab, node, python=f'"{file}"'):
                yield

    return inject


add(
    "no-python", "the Python of cluster.toml is not on the node", "python.interpreter", "python.packages",
    inject=says(python='"~/.homelab/env/bin/python"'), namespaces=False,
)  # fmt: skip
# As in an environment whose Python was removed by an upgrade of the system.
add(
    "broken-python", "the Python of cluster.toml does not start", "python.interpreter", "ssh.login",
    inject=_python("#!/usr/lib/python3.8/gone\n"), namespaces=False,
)  # fmt: skip
# As with a wrapper that was made for people.
add(
    "python-only-greets", "the Python of cluster.toml prints a welcome and does nothing else", "ssh.login",
    inject=_python("#!/bin/sh\necho Welcome\n"), namespaces=False,
)  # fmt: skip
