"""Changes of one node from the outside: programs in its namespaces, its own layer over a folder, its lines of cluster.toml.

Every change is a context manager that undoes it. Only the node sees what is mounted: its mounts are private.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.lab import nodes, procfs, sshd
from homelab.lab.lab import Lab
from homelab.lab.tools import call, program
from scripts.practice.misconfigurations.misconfiguration import Inject, NotInjectable

_number = itertools.count(1)


def needs(*programs: str, package: str = "") -> None:
    """Raise NotInjectable that names the programs that are not installed."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        raise NotInjectable(f"{', '.join(missing)} is not installed", where="this machine", hint=f"apt install {package or missing[0]}")


def first_process(lab: Lab, node: str) -> int:
    """The pid (as this machine sees it) of the node's first process. Raises HomelabError when the node is off."""
    if lab.state.backend != "namespaces":
        raise NotInjectable(
            "nodes of the loopback backend share this machine's network and files", where=str(lab.folder),
            hint=Hint("start the lab as root: sudo {} ...", homelab("lab up")),
        )  # fmt: skip
    pid = nodes.init_of(lab.state, lab.state.node(node))
    if pid is None:
        raise HomelabError(f"{node} has no power", where=node, hint="give it power first: power-on")
    return pid


def enter(lab: Lab, node: str) -> list[str]:
    """The words in front of a command that run it on the node, where it sees what the node's processes see."""
    return [program("nsenter"), f"--target={first_process(lab, node)}", "--mount", "--net", "--pid", "--uts", "--ipc"]


def inside(lab: Lab, node: str, *command: str) -> str:
    """Run a program in the node's namespaces to its end and return what it printed. Raises HomelabError with its own words."""
    return call(*enter(lab, node), *command)


def view(lab: Lab, node: str, path: str | Path) -> Path:
    """`path` as the node sees it, for reading and writing from here (the path must not lead over an absolute link)."""
    return Path(f"/proc/{first_process(lab, node)}/root", str(path).lstrip("/"))


@contextlib.contextmanager
def running(lab: Lab, node: str, *command: str, environment: Mapping[str, str] | None = None) -> Iterator[int]:
    """A program that runs on the node meanwhile, with the node's mark and `environment` as its whole environment; its pid there."""
    marked = {"PATH": sshd.SYSTEM_PATH, **lab.state.environment(lab.state.node(node)), **(environment or {})}
    process = subprocess.Popen(
        [*enter(lab, node), *command], env=marked, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        # nsenter forks to enter the namespace of process numbers: its child is the program.
        children: set[int] = set()

        def started() -> bool:
            children.update(procfs.descendants([process.pid], procfs.processes()) - {process.pid})
            return any(procfs.command_line(pid) == list(command) for pid in children)

        if not procfs.until(started, 10.0):
            raise HomelabError(f"{command[0]} did not start", where=node, hint="run it there by hand")
        yield _number_inside(next(pid for pid in children if procfs.command_line(pid) == list(command)))
    finally:
        procfs.send(procfs.descendants([process.pid], procfs.processes()), signal.SIGKILL)
        process.wait()


def _number_inside(pid: int) -> int:
    """The number that a process has in its own namespace (proc(5), NSpid)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return pid


@contextlib.contextmanager
def mounted(lab: Lab, node: str, target: str, *words: str) -> Iterator[None]:
    """Something is mounted on `target` on the node: `mount WORDS target`. Raises NotInjectable when it cannot be."""
    try:
        inside(lab, node, "mount", *words, target)
    except HomelabError as error:
        raise NotInjectable(error.message, where=f"{node}, {target}", hint=error.hint) from error
    try:
        yield
    finally:
        with contextlib.suppress(HomelabError):  # a node that lost its power has no mounts any more
            inside(lab, node, "umount", "--lazy", target)


@contextlib.contextmanager
def covered(lab: Lab, node: str, target: str, text: str) -> Iterator[None]:
    """The file `target` (which must exist) reads `text` on the node."""
    with own_folder(lab, node) as folder:
        (folder / "file").write_text(text)
        with mounted(lab, node, target, "--bind", str(folder / "file")):
            yield


@contextlib.contextmanager
def layered(lab: Lab, node: str, folder: str, lower: str = "") -> Iterator[Path]:
    """The node has a layer of its own over `folder`: what is written to the path that is yielded, only it sees, and only now.

    `lower`: what lies below instead of the folder itself.
    """
    if not view(lab, node, folder).is_dir():
        raise NotInjectable(f"there is no folder {folder}", where=node, hint=f"mkdir -p {folder}")
    # The layer itself is in memory: what the lab's folder lies on may be a layer already, and cannot carry another one.
    with own_folder(lab, node) as own, mounted(lab, node, str(own), "-t", "tmpfs", "-o", "size=2g", "tmpfs"):
        for name in ("upper", "work"):
            view(lab, node, own / name).mkdir()
        options = f"lowerdir={lower or folder},upperdir={own / 'upper'},workdir={own / 'work'}"
        with mounted(lab, node, folder, "-t", "overlay", "-o", options, "overlay"):
            yield view(lab, node, folder)


@contextlib.contextmanager
def edited(file: Path, change: Callable[[str], str]) -> Iterator[None]:
    """A text file reads as `change` made it; written in place, so that a file mounted elsewhere changes there too."""
    before = file.read_text(errors="surrogateescape")
    after = change(before)
    assert after != before, f"{file} has not changed"
    file.write_text(after, errors="surrogateescape")
    try:
        yield
    finally:
        file.write_text(before, errors="surrogateescape")


@contextlib.contextmanager
def cluster_says(lab: Lab, node: str, **keys: str | None) -> Iterator[None]:
    """The node's keys of cluster.toml are these (values in TOML); None: the key is not there."""

    def change(text: str) -> str:
        head, *blocks = re.split(r"(?m)^(?=\[\[nodes\]\])", text)
        named = f"name = {json.dumps(node)}"
        return head + "".join(_with_keys(block, keys) if named in block.splitlines() else block for block in blocks)

    with edited(lab.cluster_file, change):
        yield


def says(**keys: str | None) -> Inject:
    """`cluster_says` with these keys, as a misconfiguration."""
    return lambda lab, node: cluster_says(lab, node, **keys)


def _with_keys(block: str, keys: Mapping[str, str | None]) -> str:
    lines = [line for line in block.rstrip("\n").splitlines() if line.partition(" = ")[0] not in keys]
    return "\n".join([*lines, *(f"{key} = {value}" for key, value in keys.items() if value is not None)]) + "\n\n"


@contextlib.contextmanager
def sessions_have(lab: Lab, node: str, **environment: str) -> Iterator[None]:
    """Every session of the node has these variables, as a line in /etc/environment would do it."""
    folder = lab.state.node_folder(lab.state.node(node))
    words = " ".join(f'"{name}={value}"' for name, value in environment.items())
    with contextlib.ExitStack() as stack:
        stack.callback(restart_sshd, lab, node)
        stack.enter_context(edited(sshd.configuration(folder), lambda text: re.sub(r"(?m)^(SetEnv .*)$", rf"\1 {words}", text)))
        restart_sshd(lab, node)
        yield


def sshd_process(lab: Lab, node: str) -> int:
    """The pid of the node's listening sshd."""
    first = first_process(lab, node)
    servers = [
        process.pid for process in procfs.processes().values()
        if process.parent == first and " -D " in " ".join(procfs.command_line(process.pid))  # it renames itself
    ]  # fmt: skip
    if not servers:
        raise HomelabError(f"{node} has no sshd", where=node, hint="cut its power and give it back")
    return servers[0]


def restart_sshd(lab: Lab, node: str) -> None:
    """Let sshd read its configuration and keys anew; returns when it listens again. Nothing happens on a node without power."""
    if nodes.init_of(lab.state, lab.state.node(node)) is None:
        return
    log = lab.state.node_folder(lab.state.node(node)) / "sshd.log"
    listening = "Server listening on"
    before = log.read_text(errors="replace").count(listening)
    procfs.send([sshd_process(lab, node)], signal.SIGHUP)
    if not procfs.until(lambda: log.read_text(errors="replace").count(listening) > before, 10.0):
        raise HomelabError(f"sshd of {node} did not come back", where=str(log), hint="read the log")


@contextlib.contextmanager
def own_folder(lab: Lab, node: str) -> Iterator[Path]:
    """An empty folder that the node sees too, under the same path."""
    place = lab.state.node_folder(lab.state.node(node)) / "faults"
    folder = place / str(next(_number))
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            place.rmdir()  # only when no other fault is in it
