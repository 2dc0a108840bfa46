"""The process that holds a misconfiguration: python -m homelab.lab.misconfigurations.holder FOLDER NODE NAME.

It injects, prints one line of JSON ({"preflight": ...} or {"error", "where", "hint", "is_input"}), waits for SIGTERM, and undoes.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import signal
import sys
from pathlib import Path

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.lab import held_fault, nodes
from homelab.lab.lab import Lab
from homelab.lab.misconfigurations import catalogue, training_files
from homelab.lab.misconfigurations.misconfiguration import Misconfiguration, NotInjectable


def main(folder: Path, node: str, name: str) -> int:
    """Returns the exit code; 0 when it was injected and undone."""
    # A handler runs in the middle of whatever waits: the lock of an Event may be held there by itself, and that waits for ever.
    told_to_end: queue.SimpleQueue[int] = queue.SimpleQueue()
    # Handlers, because a signal that is ignored or blocked here stays so in the programs that are started.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: told_to_end.put(number))
    try:
        lab = Lab.open(folder)
        misconfiguration = catalogue.find(name)
        check(lab, node, misconfiguration)
        held_fault.claim(folder, name, node)
    except HomelabError as error:
        return _tell_error(error)
    is_injected = False
    try:
        recipe = training_files.place(lab) if "recipe" in misconfiguration.needs else None
        with catalogue.injected(lab, node, misconfiguration):
            is_injected = True
            words = [*([shlex.quote(str(recipe))] if recipe else []), *(["--deep"] if "deep" in misconfiguration.needs else [])]
            try:
                _tell(preflight=" ".join([*words, "--cluster", shlex.quote(str(lab.cluster_file))]))
            except BrokenPipeError:  # the terminal that asked is gone, so the fault is undone
                told_to_end.put(signal.SIGHUP)
            told_to_end.get()
    except HomelabError as error:
        if is_injected:  # it is not undone, so the record stays
            print(error.message, file=sys.stderr)
            return error.exit_code
        held_fault.release(folder)
        return _tell_error(error)
    except BaseException:
        if not is_injected:
            held_fault.release(folder)
        raise
    held_fault.release(folder)
    return 0


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
            hint=homelab("lab fault", folder, head, misconfiguration.name),
        )
    if nodes.init_of(lab.state, lab_node) is None:
        raise HomelabError(f"{node} has no power", where=node, hint=homelab("lab fault", folder, node, "power-on"))


def _tell(**answer: object) -> None:
    """Print the answer; nothing after it goes to the pipe, because its reader is gone."""
    try:
        print(json.dumps(answer), flush=True)
    finally:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _tell_error(error: HomelabError) -> int:
    _tell(error=error.message, where=error.where, hint=error.hint, is_input=isinstance(error, InputError))
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
