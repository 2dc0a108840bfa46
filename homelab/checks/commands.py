"""The commands that hints are made of: text a person can paste into the controller's terminal."""

from __future__ import annotations

import shlex
import urllib.parse
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from homelab.checks.evidence import Evidence
from homelab.config.cluster import Node
from homelab.facts import Facts
from homelab.planning.command import quote_path, quote_words

# What the built-in worker imports in every run.
WORKER_PACKAGES = ("torch", "transformers", "peft", "accelerate")
GIB = 2**30


def answered(evidence: Evidence) -> Iterator[tuple[Node, Facts]]:
    """The nodes that gave facts, in the order of cluster.toml."""
    for node in evidence.cluster.nodes:
        if node.name in evidence.facts:
            yield node, evidence.facts[node.name]


def on_node(node: Node, command: str) -> str:
    """`command` (shell text), run on this node from the controller; as it is where the node is the controller itself."""
    if node.host == "local":
        return command
    words = ["ssh"]
    if "sudo " in command:
        words.append("-t")  # sudo asks for a password, and needs a terminal to do so
    if node.known_hosts:
        words += known_hosts_option(node.known_hosts)
    if node.port != 22:
        words += ["-p", str(node.port)]
    if node.identity_file:
        words += ["-i", node.identity_file]
    words.append(f"{node.user}@{node.host}" if node.user else node.host)
    return quote_words([*words, command])


def known_hosts_option(file: str) -> list[str]:
    """The words that make ssh and scp use this file; in its quotes a space does not begin another file (ssh_config(5))."""
    return ["-o", f'UserKnownHostsFile="{file}"' if " " in file else f"UserKnownHostsFile={file}"]


def as_root(node: Node, facts: Facts, command: str) -> str:
    """`command`, run on this node with the rights of root: by sudo, unless the login is root's already."""
    return on_node(node, command if facts.user == "root" else f"sudo {command}")


def written_as_root(facts: Facts, lines: Iterable[str], file: str, *, append: bool = False) -> str:
    """Shell text for the node that writes these lines to a file of its system."""
    words = ["tee", *(["-a"] if append else []), file]
    sudo = "" if facts.user == "root" else "sudo "
    return f"printf '%s\\n' {quote_words(lines)} | {sudo}{quote_words(words)} > /dev/null"


def path_word(path: str) -> str:
    """A path on a node as one shell word; `~/` stays readable where nothing else needs quotes."""
    rest = path[2:] if path.startswith("~/") else path
    return path if rest and shlex.quote(rest) == rest else quote_path(path)


def environment_of(node: Node) -> str | None:
    """The folder of the node's virtual environment, from `python = .../bin/python`; None for any other shape of path."""
    python = PurePosixPath(node.python)
    if python.parent.name != "bin" or str(python.parent.parent) in ("/", "/usr", "/usr/local"):
        return None
    return str(python.parent.parent)


def create_environment(node: Node, requirements: Iterable[str], base_python: str = "python3") -> str:
    """The command that makes the node's virtual environment and installs what the worker needs."""
    folder = environment_of(node) or "~/.homelab/env"
    pip = path_word(f"{folder}/bin/pip")
    return on_node(node, f"{base_python} -m venv {path_word(folder)} && {pip} install {quote_words(requirements)}")


def pip_install(node: Node, requirements: Iterable[str], options: str = "") -> str:
    """The command that installs packages into the node's Python."""
    return on_node(node, f"{path_word(node.python)} -m pip install {options}{quote_words(requirements)}")


def copy_between(source: Node, source_path: str, target: Node, target_path: str) -> str:
    """The command that copies a file or folder (its last name stays) from one node to another, through the controller."""
    words = ["scp", "-3", "-r"]
    for file in dict.fromkeys(node.known_hosts for node in (source, target) if node.known_hosts):
        words += known_hosts_option(file)
    for identity in dict.fromkeys(node.identity_file for node in (source, target) if node.identity_file):
        words += ["-i", identity]
    return " ".join([quote_words(words), _scp_place(source, source_path), _scp_place(target, target_path)])


def _scp_place(node: Node, path: str) -> str:
    """One shell word. Paths below ~ are given relative to the home folder, so that no remote shell has to expand anything."""
    if node.host == "local":
        return path_word(path)
    plain = path.removeprefix("~/")
    user = f"{node.user}@" if node.user else ""
    host = f"[{node.host}]" if ":" in node.host else node.host
    if node.port == 22:
        return shlex.quote(f"{user}{host}:{plain}")
    return shlex.quote(f"scp://{user}{host}:{node.port}/{urllib.parse.quote(plain)}")


def listed(names: Iterable[str]) -> str:
    """'tower, laptop and oldtower'."""
    items = list(names)
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else "".join(items)


def decimal_size(size_bytes: int) -> str:
    """'1.2 MB', for disks and files: powers of ten, as their makers count."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= limit:
            return f"{size_bytes / limit:.1f} {unit}"
    return f"{size_bytes} bytes"


def binary_size(size_bytes: int) -> str:
    """'7.6 GiB', for memory: powers of two, as nvidia-smi and the kernel count."""
    return f"{size_bytes / GIB:.1f} GiB"
