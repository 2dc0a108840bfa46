"""The commands that reach a node, as a person pastes them into the controller's terminal. Pure."""

from __future__ import annotations

import shlex
import urllib.parse
from collections.abc import Iterable
from pathlib import PurePosixPath

from homelab.controller.base.hint import Command
from homelab.controller.base.shell import quote_path, quote_words
from homelab.controller.config.cluster import Node
from homelab.controller.facts.node import Facts

# What the built-in worker imports in every run.
WORKER_PACKAGES = ("torch", "transformers", "peft", "accelerate")


def on_node(node: Node, *commands: str, options: Iterable[str] = ()) -> Command:
    """The commands (shell text), one after the other on this node, as the controller runs them; without ssh where the node is the controller.

    `options` are those of ssh.
    """
    script = " && ".join(commands)
    needs_root = any(isinstance(command, Command) and command.needs_root for command in commands)
    if node.host == "local":
        return Command(script, on_node=node.name, needs_root=needs_root)
    words = ["ssh", *options]
    if needs_root:
        words.append("-t")  # sudo asks for a password, and needs a terminal to do so
    if node.known_hosts:
        words += known_hosts_option(node.known_hosts)
    if node.port != 22:
        words += ["-p", str(node.port)]
    if node.identity_file:
        words += ["-i", node.identity_file]
    words.append(f"{node.user}@{node.host}" if node.user else node.host)
    return Command(quote_words([*words, script]), on_node=node.name, needs_root=needs_root)


def known_hosts_option(file: str) -> list[str]:
    """The words that make ssh and scp use this file; in its quotes a space does not begin another file (ssh_config(5))."""
    return ["-o", f'UserKnownHostsFile="{file}"' if " " in file else f"UserKnownHostsFile={file}"]


def by_root(command: str, facts: Facts | None = None) -> Command:
    """Shell text for the node that runs `command` with the rights of root: by sudo, unless the node says that its login is root's."""
    return Command(command) if facts is not None and facts.system.user == "root" else Command(f"sudo {command}", needs_root=True)


def as_root(node: Node, facts: Facts, *commands: str) -> Command:
    """The commands, one after the other on this node, each with the rights of root."""
    return on_node(node, *(by_root(command, facts) for command in commands))


def nvidia_smi(facts: Facts, options: str = "") -> str:
    """Shell text for the node that calls its nvidia-smi, which a login of WSL2 or NixOS without a terminal does not find by its name."""
    path = PurePosixPath(facts.gpu.program)
    is_path = path.is_absolute() and path.name == "nvidia-smi"
    return f"{shlex.quote(str(path)) if is_path else 'nvidia-smi'} {options}".rstrip()


# For a machine of which nothing is known but its name.
RESTART_IN_WORDS = "sudo reboot (WSL: in PowerShell wsl --shutdown)"
RESTART_OF_CARD_IN_WORDS = "sudo reboot, or of WSL: wsl --shutdown in PowerShell, then restart Windows"


def restart(node: Node, facts: Facts, *, of_card: bool = True) -> str:
    """The command that restarts the machine, and with it the driver of its cards. In words for WSL, whose `reboot` restarts neither: the driver is
    that of Windows. `of_card` False: the restart is for the system alone."""
    if facts.network.wsl is None:
        return as_root(node, facts, "reboot")
    return "restart Windows (in PowerShell first: wsl --shutdown)" if of_card else "in PowerShell: wsl --shutdown"


def written_as_root(facts: Facts, lines: Iterable[str], file: str, *, append: bool = False) -> Command:
    """Shell text for the node that writes these lines to a file of its system."""
    tee = by_root(quote_words(["tee", *(["-a"] if append else []), file]), facts)
    return Command(f"printf '%s\\n' {quote_words(lines)} | {tee} > /dev/null", needs_root=tee.needs_root)


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


def create_environment(node: Node, requirements: Iterable[str], base_python: str = "python3") -> Command:
    """The command that makes the node's virtual environment and installs what the worker needs."""
    folder = environment_of(node) or "~/.homelab/env"
    pip = path_word(f"{folder}/bin/pip")
    return on_node(node, f"{base_python} -m venv {path_word(folder)}", f"{pip} install {quote_words(requirements)}")


def pip_install(node: Node, requirements: Iterable[str], options: str = "") -> Command:
    """The command that installs packages into the node's Python."""
    return on_node(node, f"{path_word(node.python)} -m pip install {options}{quote_words(requirements)}")


def copy_between(source: Node, source_path: str, target: Node, target_path: str) -> Command:
    """The command that copies a file or folder (its last name stays) from one node to another, through the controller."""
    words = ["scp", "-3", "-r"]
    for file in dict.fromkeys(node.known_hosts for node in (source, target) if node.known_hosts):
        words += known_hosts_option(file)
    for identity in dict.fromkeys(node.identity_file for node in (source, target) if node.identity_file):
        words += ["-i", identity]
    return Command(" ".join([quote_words(words), _scp_place(source, source_path), _scp_place(target, target_path)]))


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
