"""What is wrong with a node that did not answer a question, in the node's own words, and what helps."""

from __future__ import annotations

import re
from typing import Any

from homelab.controller.base.errors import BusyError, HomelabError, NoRoomError, StoppedError, SupersededError, TakenError
from homelab.controller.base.hint import Command, Hint, homelab
from homelab.controller.base.node_words import advice
from homelab.controller.base.sanitize import plain_lines
from homelab.controller.config.cluster import Node
from homelab.controller.facts.node_commands import by_root, on_node, path_word
from homelab.controller.remote import ship
from homelab.controller.remote.bootstrap import AGENT_MARK
from homelab.controller.remote.session import Completed

PYTHON_MISSING = 98
_NOT_WRITABLE = ("Permission denied", "Read-only file system", "Not a directory", "File exists", "No such file or directory: '")
_OF_KINDS = {"taken": TakenError, "stopped": StoppedError, "superseded": SupersededError, "busy": BusyError, "no-room": NoRoomError}
# How a Python ends that finds other files than those that were shipped.
_OF_DAMAGED_CODE = re.compile(
    r"^(?:SyntaxError|IndentationError)\b|^(?:ImportError|ModuleNotFoundError): .*homelab|No module named '?homelab"
)


def refusal(node: Node, error: dict[str, Any]) -> HomelabError:
    """The node's own refusal (`homelab.node.verbs.refusal_of`), made harmless."""
    message = plain_lines(str(error["message"]))
    if error["kind"] == "full":
        return full(node, f": {message}")
    if error["kind"] == "internal" and _OF_DAMAGED_CODE.search(message):
        return damaged(node, message)
    hint = Hint("{}; by hand: {}", homelab("preflight --nodes", node.name), on_workdir(node, "ls -l"))
    where = plain_lines(str(error.get("where") or ""))
    return _OF_KINDS.get(str(error["kind"]), HomelabError)(
        message, where=f"{where_of(node)}{', ' if where else ''}{where}", hint=advice(node.name, error.get("hint")) or hint
    )


def full(node: Node, details: str = "") -> HomelabError:
    """No space is left on its disk."""
    return HomelabError(
        f"the disk is full{details}", where=where_of(node),
        hint=f"make room: {on_workdir(node, 'df -h')}; or edit cluster.toml, node {node.name}: workdir = ...",
    )  # fmt: skip


def not_begun(node: Node, completed: Completed) -> HomelabError:
    """The login shell itself did something else than the command it was given."""
    output = plain_lines(b"\n".join([completed.stdout[-2000:], completed.stderr[-2000:]]).decode("utf-8", "replace"))
    last = ([line for line in output.splitlines() if line.strip()] or ["it said nothing"])[-1][:300]
    return HomelabError(
        f"its shell ended before it started homelab's agent (exit code {completed.returncode}): {last}", where=where_of(node),
        hint=f"this must print two lines: {on_node(node, 'echo; echo here')}; if it does not, look at the account's login shell. Look for "
        "an exit or an exec in the files that it reads at start (~/.bashrc, ~/.profile, ~/.config/fish/config.fish, ~/.cshrc)",
    )  # fmt: skip


def damaged(node: Node, last: str) -> HomelabError:
    """Its Python has found other code than what was shipped."""
    return HomelabError(
        f"homelab's code on this node was changed or is damaged: {last}", where=where_of(node),
        hint=f"{on_node(node, f'rm -r {path_word(ship.code_dir(node.workdir))}')} (homelab then sends it again)",
    )  # fmt: skip


def error(node: Node, message: str, completed: Completed, output: bytes = b"") -> HomelabError:
    """For a question that has no answer. `output`: what came on stdout instead of an answer. Its words are shown where stderr has none."""
    text = plain_lines(completed.stderr.decode("utf-8", "replace"))
    words = text or plain_lines(output[-2000:].decode("utf-8", "replace").replace(AGENT_MARK, ""))
    last = ([line for line in words.splitlines() if line.strip()] or ["it said nothing"])[-1][:300]
    if completed.returncode == PYTHON_MISSING:
        return HomelabError(
            f"there is no Python at {node.python}, and no python3 either",
            where=where_of(node),
            hint=f"{on_node(node, by_root('apt install python3-venv'), 'python3 -m venv ~/.homelab/env')}; then edit cluster.toml: python = ...",
        )
    if "No space left" in text or "Errno 28" in text:
        return full(node)
    if last.endswith("homelab needs 3.9 or newer"):
        return HomelabError(
            last, where=f"{where_of(node)}, python = {node.python}",
            hint=f"install a newer one there, make an environment with it, then edit cluster.toml, node {node.name}: python = ...",
        )  # fmt: skip
    if completed.returncode < 0:
        return HomelabError(
            "the agent was killed while it answered (out of memory?)", where=where_of(node),
            hint=on_node(node, Command("free -h; sudo dmesg | tail", needs_root=True)),
        )  # fmt: skip
    if completed.returncode == 1 and _OF_DAMAGED_CODE.search(last):
        return damaged(node, last)
    if completed.returncode in (126, 127):  # message of a shell that cannot start a program
        return HomelabError(
            f"the Python of this node does not start: {last}", where=f"{where_of(node)}, python = {node.python}",
            hint=f"{on_node(node, f'{path_word(node.python)} --version')}; or edit cluster.toml: python = ...",
        )  # fmt: skip
    if any(words in last for words in _NOT_WRITABLE):
        return HomelabError(
            f"the workdir cannot be written: {last}",
            where=f"{where_of(node)}, workdir = {node.workdir}",
            hint=f"{on_workdir(node, 'ls -ld')}; or edit cluster.toml, node {node.name}: workdir = ...",
        )
    by_hand = f"by hand: {on_node(node, 'true')}"
    if output and not text:
        python = on_node(node, f"{path_word(node.python)} -c pass")
        by_hand = f"this must print nothing: {python}; if it prints something, check its sitecustomize and .pth files"
    return HomelabError(f"{message}: {last}", where=where_of(node), hint=by_hand)


def where_of(node: Node) -> str:
    """The node, as an error names it."""
    return f"node {node.name} ({node.host})"


def on_workdir(node: Node, command: str, below: str = "") -> str:
    """The text that runs a command on a path of the workdir, for a hint."""
    return on_node(node, f"{command} {path_word(node.workdir + below)}")
