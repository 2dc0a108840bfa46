"""Flaws that keep us from a node at all: its power, its keys, its account, its shell, its Python."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from homelab.lab import files, sshd
from homelab.lab.flaws.flaw import flaw
from homelab.lab.flaws.inside import cluster_says, edited, own_folder, restart_sshd
from homelab.lab.lab import Lab


@flaw("no-power", "the node is off", "ssh.login")
def no_power(lab: Lab, node: str) -> Iterator[None]:
    """Or asleep."""
    lab.fault(node, "power-cut")
    try:
        yield
    finally:
        lab.fault(node, "power-on")


@flaw("cable-pulled", "the node's cable is pulled", "ssh.login")
def cable_pulled(lab: Lab, node: str) -> Iterator[None]:
    """It runs, and nobody hears of it."""
    lab.fault(node, "pull-cable")
    try:
        yield
    finally:
        lab.fault(node, "plug-cable")


@flaw("frozen", "the node stands still, its connections stay open", "ssh.login")
def frozen(lab: Lab, node: str) -> Iterator[None]:
    """A machine that swaps itself to death: the kernel takes connections, no program answers."""
    lab.fault(node, "freeze")
    try:
        yield
    finally:
        lab.fault(node, "thaw")


@flaw("no-sshd", "nothing listens on the node's SSH port", "ssh.login")
def no_sshd(lab: Lab, node: str) -> Iterator[None]:
    """The service is not installed, or another port was chosen for it."""
    with cluster_says(lab, node, port="2222"):
        yield


@flaw("host-key-changed", "the node's host key is not the known one", "ssh.login")
def host_key_changed(lab: Lab, node: str) -> Iterator[None]:
    """The machine was set up anew, or another one answers in its place."""
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


@flaw("host-key-unknown", "the node's host key was never accepted", "ssh.login")
def host_key_unknown(lab: Lab, node: str) -> Iterator[None]:
    """A new node, or a new laptop."""
    name = sshd.known_hosts_line(lab.state.node(node).host, lab.state.node(node).port, "").split()[0]
    with edited(
        lab.folder / files.KNOWN_HOSTS_FILE,
        lambda text: "".join(line for line in text.splitlines(keepends=True) if line.split()[0] != name),
    ):
        yield


@flaw("key-refused", "the node does not know our key", "ssh.login")
def key_refused(lab: Lab, node: str) -> Iterator[None]:
    """`ssh-copy-id` was forgotten."""
    with edited(lab.state.node_folder(lab.state.node(node)) / "authorized_keys", lambda text: ""):
        yield


@flaw("wrong-key", "cluster.toml names another key than the node's", "ssh.login")
def wrong_key(lab: Lab, node: str) -> Iterator[None]:
    """A key that exists, for something else."""
    with _another_key(lab, node) as key, cluster_says(lab, node, identity_file=f'"{key}"'):
        yield


@contextlib.contextmanager
def _another_key(lab: Lab, node: str) -> Iterator[Path]:
    with own_folder(lab, node) as folder:
        sshd.make_key(folder / "id_ed25519", "for something else")
        yield folder / "id_ed25519"


@flaw("key-missing", "the key that cluster.toml names is not there", "ssh.login")
def key_missing(lab: Lab, node: str) -> Iterator[None]:
    """cluster.toml was copied from another computer."""
    with cluster_says(lab, node, identity_file='"keys/id_rsa_of_the_old_laptop"'):
        yield


@flaw("wrong-user", "cluster.toml names an account that may not log in", "ssh.login")
def wrong_user(lab: Lab, node: str) -> Iterator[None]:
    """The name from another machine."""
    with cluster_says(lab, node, user='"nobody"'):
        yield


@contextlib.contextmanager
def shell(lab: Lab, node: str, script: str) -> Iterator[None]:
    """The account's login shell is this program."""
    here = lab.state.node(node)
    with own_folder(lab, node) as folder:
        file = folder / "shell"
        file.write_text(script)
        file.chmod(0o755)
        passwd = lab.state.node_folder(here) / "etc" / "passwd"
        with edited(passwd, lambda text: re.sub(rf"(?m)^({re.escape(here.user)}:.*):[^:\n]*$", rf"\1:{file}", text)):
            yield


@flaw("no-shell", "the account's shell prints a sentence and ends", "ssh.login")
def no_shell(lab: Lab, node: str) -> Iterator[None]:
    """What /usr/sbin/nologin does."""
    with shell(lab, node, "#!/bin/sh\necho 'This account is currently not available.'\nexit 1\n"):
        yield


@flaw("menu-shell", "the account's shell asks a question instead of running commands", "ssh.login")
def menu_shell(lab: Lab, node: str) -> Iterator[None]:
    """As on a storage box with a menu: it prints, reads a line, and says that everything went well."""
    with shell(
        lab, node, "#!/bin/sh\nprintf '\\033[1m1) Status  2) Reboot\\033[0m\\n> '\nread -r answer\necho bye\nexit 0\n"
    ):
        yield


@flaw("slow-login", "the first login takes a quarter of a minute", "ssh.slow")
def slow_login(lab: Lab, node: str) -> Iterator[None]:
    """A disk that has to spin up, a home on a sleeping network drive."""
    with own_folder(lab, node) as folder:
        script = f'#!/bin/sh\nmkdir {folder}/woken 2>/dev/null && sleep 16\nexec /bin/sh "$@"\n'
        with shell(lab, node, script):
            yield


@flaw("no-python", "the Python of cluster.toml is not on the node", "python.interpreter", "python.packages")
def no_python(lab: Lab, node: str) -> Iterator[None]:
    """The environment was never made on this one."""
    with cluster_says(lab, node, python='"~/.homelab/env/bin/python"'):
        yield


@flaw("broken-python", "the Python of cluster.toml does not start", "python.interpreter", "ssh.login")
def broken_python(lab: Lab, node: str) -> Iterator[None]:
    """An environment whose Python was removed by an upgrade of the system."""
    with own_folder(lab, node) as folder:
        file = folder / "python"
        file.write_text("#!/usr/lib/python3.8/gone\n")
        file.chmod(0o755)
        with cluster_says(lab, node, python=f'"{file}"'):
            yield


@flaw("python-only-greets", "the Python of cluster.toml prints a welcome and does nothing else", "ssh.login")
def python_only_greets(lab: Lab, node: str) -> Iterator[None]:
    """A wrapper of a company, or of a module system, that was made for people."""
    with own_folder(lab, node) as folder:
        file = folder / "python"
        file.write_text("#!/bin/sh\necho Welcome\n")
        file.chmod(0o755)
        with cluster_says(lab, node, python=f'"{file}"'):
            yield
