"""A misconfiguration to try by hand: python -m scripts.practice.misconfigurations DIR NODE NAME, or --list.

It injects, prints the command that finds it, waits for Ctrl-C (or SIGTERM, SIGHUP), and undoes. A lab has one at a time: several would undo
each other's changes in the wrong order. Undo it before `homelab lab down`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import queue
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.lab import nodes
from homelab.lab.lab import Lab
from scripts.practice.misconfigurations import catalogue, training_files
from scripts.practice.misconfigurations.misconfiguration import Misconfiguration, NotInjectable

PROGRAM = "python -m scripts.practice.misconfigurations"


def hold(folder: Path, node: str, name: str) -> None:
    """Returns when it was injected and undone. Raises HomelabError where it cannot be."""
    # A handler runs in the middle of whatever waits: the lock of an Event may be held there by itself, and that waits for ever.
    told_to_end: queue.SimpleQueue[int] = queue.SimpleQueue()
    # Handlers, because a signal that is ignored or blocked here stays so in the programs that are started.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: told_to_end.put(number))
    lab = Lab.open(folder)
    misconfiguration = catalogue.find(name)
    check(lab, node, misconfiguration)
    with alone(folder):
        recipe = training_files.place(lab) if "recipe" in misconfiguration.needs else None
        with catalogue.injected(lab, node, misconfiguration):
            words = [*([shlex.quote(str(recipe))] if recipe else []), *(["--deep"] if "deep" in misconfiguration.needs else [])]
            command = " ".join(["homelab preflight", *words, "--cluster", shlex.quote(str(lab.cluster_file))])
            try:
                print(f"Next: {command}  (found by {', '.join(misconfiguration.checks)})\nCtrl-C undoes it.", flush=True)
            except BrokenPipeError:  # the terminal that asked is gone, so it is undone
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), sys.stdout.fileno())
                return
            told_to_end.get()


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other misconfiguration is held in this lab meanwhile. Raises InputError where one is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise InputError(
            "this lab has a misconfiguration already, and it has one at a time", where=str(folder),
            hint=f'press Ctrl-C in the terminal that holds it; pgrep -af "{PROGRAM}" shows it',
        ) from None  # fmt: skip
    finally:
        os.close(descriptor)


def check(lab: Lab, node: str, misconfiguration: Misconfiguration) -> None:
    """Raises InputError or NotInjectable where `node` cannot have it."""
    folder = str(lab.folder)
    lab_node, head = lab.state.node(node), lab.nodes[0].name
    if misconfiguration.namespaces and lab.state.backend != "namespaces":
        raise NotInjectable(
            f"{misconfiguration.name} needs a lab of the namespaces backend; nodes of this one share the machine's network and files",
            where=str(lab.folder),
            hint=Hint("start one as root: sudo {}", homelab("lab up DIR --backend namespaces")),
        )
    if misconfiguration.where == "head" and node != head:
        raise InputError(
            f"{misconfiguration.name} makes sense on the head only, which is {head}",
            where=node,
            hint=f"{PROGRAM} {shlex.quote(folder)} {head} {misconfiguration.name}",
        )
    if nodes.init_of(lab.state, lab_node) is None:
        raise HomelabError(f"{node} has no power", where=node, hint=homelab("lab fault", folder, node, "power-on"))


def listing() -> list[str]:
    """A line for each: its name, what is wrong, what it needs, and the checks that find it."""
    lines = []
    for one in catalogue.all_misconfigurations():
        needs = [*(["root"] if one.namespaces else []), *one.needs]
        needs += ["the head"] if one.where == "head" else ["two nodes"] if one.where == "pair" else []
        needed = f" (needs {', '.join(needs)})" if needs else ""
        lines.append(f"{one.name:24} {one.title}{needed}: {', '.join(one.checks)}")
    return lines


def main() -> int:
    """Returns the exit code; 0 when it was injected and undone."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list all of them, and the checks of preflight that find them")
    parser.add_argument("target", nargs="*", metavar="DIR NODE NAME", help="the lab's folder, the node, and what is wrong with it")
    options = parser.parse_args()
    if options.list:
        print(*listing(), sep="\n")
        return 0
    if len(options.target) != 3:
        parser.error("name the lab's folder, the node and the misconfiguration; --list lists them")
    folder, node, name = options.target
    try:
        hold(Path(folder), node, name)
    except HomelabError as error:
        print(f"error: {error.where}: {error.message}\nfix:   {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
