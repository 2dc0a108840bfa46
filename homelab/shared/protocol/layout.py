"""Where everything of a run lies, as paths relative to a workdir or to a run's folder. The controller, the node program and the
worker join them to a folder of theirs; no other file spells them.

    WORKDIR/runs/RUN/             run.json, checkpoints/, final/, profiles/, tensorboard/, reference.bin (of pairs); saved/ is for what a program of one's own saves
        attempts/N/               plan.json
            nodes/NODE/           start.json, exit.json, energy.json, house.json, logs; save.json while a checkpoint is asked for
            ranks/RANK/           heartbeat.json, metrics.jsonl, samples.jsonl, modules.json, error.json
    WORKDIR/supervised/RUN/       a supervisor that was placed on this node
    WORKDIR/data/DIGEST/          files shipped from the controller
    WORKDIR/speeds/               measured speeds
    WORKDIR/rows/                 encoded rows (the worker's cache)
    WORKDIR/yield                 made by a person at the machine who wants it, and removed again
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

# One path component that cannot climb.
USABLE_NAME = r"\w[\w.-]*"
_USABLE = re.compile(USABLE_NAME)
_SHA256 = re.compile("[0-9a-f]{64}")

RUN_JSON = "run.json"
PLAN_JSON = "plan.json"
START_JSON = "start.json"
EXIT_JSON = "exit.json"
SAVE_JSON = "save.json"
ENERGY_JSON = "energy.json"
HOUSE_JSON = "house.json"
HEARTBEAT_JSON = "heartbeat.json"
ERROR_JSON = "error.json"
METRICS_JSONL = "metrics.jsonl"
MODULES_JSON = "modules.json"
SUPERVISOR_JSON = "supervisor.json"
SUPERVISOR_LOCK = "supervisor.lock"
SUPERVISOR_LOG = "supervisor.log"
EVENTS_JSONL = "events.jsonl"
RUNS = "runs"
DATA = "data"
SPEEDS = "speeds"
YIELD = "yield"
CODE = "code"
ATTEMPTS = "attempts"
CHECKPOINTS = "checkpoints"
UNUSED = "checkpoints.unused"  # those from before a person began the run again; the newest such folder stays
REFERENCE = "reference.bin"
SAVED = "saved"
FINAL = "final"


def is_usable(name: object) -> bool:
    """True for a name that is one path component and cannot climb."""
    return isinstance(name, str) and _USABLE.fullmatch(name) is not None


def checked(name: Any) -> str:
    """The name itself. Raises ValueError when it is not usable."""
    if not isinstance(name, str) or not is_usable(name):
        raise ValueError(f"not a usable name: {name!r}")
    return name


def run(name: str) -> str:
    """Folder of a run in a workdir."""
    return f"{RUNS}/{checked(name)}"


def supervised(name: str) -> str:
    """Folder, in the workdir of a node, of a run's supervisor that was placed there."""
    return f"supervised/{checked(name)}"


def attempt(number: int) -> str:
    """Folder, in a run's, of one start of torchrun on all nodes."""
    return f"{ATTEMPTS}/{int(number)}"


def plan_json(number: int) -> str:
    """Who computes what in an attempt."""
    return f"{attempt(number)}/{PLAN_JSON}"


def nodes(number: int) -> str:
    """Folder, in a run's, of what the nodes write about one attempt."""
    return f"{attempt(number)}/nodes"


def node(number: int, name: str) -> str:
    """What one node writes about one attempt."""
    return f"{nodes(number)}/{checked(name)}"


def save_request(number: int, name: str) -> str:
    """The file that asks a node for a checkpoint."""
    return f"{node(number, name)}/{SAVE_JSON}"


def ranks(number: int) -> str:
    """Folder, in a run's, of what the ranks write in one attempt."""
    return f"{attempt(number)}/ranks"


def rank(number: int, index: int | str) -> str:
    """What one rank writes in one attempt."""
    return f"{ranks(number)}/{int(index)}"


def speeds_name(model: str, kind: str, base: str = "auto") -> str:
    """Name of the file of measured speeds of a model (hub id or folder) and a method, e.g. `smollm2-135m-instruct-lora.json`. `base`: of [method]."""
    last = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return f"{re.sub(r'[^a-z0-9._-]+', '-', last) or 'model'}-{kind}{'' if base == 'auto' else f'-{base}'}.json"


def data_file(entry: Mapping[str, Any]) -> str:
    """A shipped file in a workdir. Its folder is named by its content, so a changed file is another file.

    `entry`: "sha256" and "name"; files that belong together share "folder", a digest of them all, and each has its place "inside".
    Raises ValueError for an entry that leads to another folder.
    """
    digest = str(entry.get("folder") or entry["sha256"])
    for value in (str(entry["sha256"]), digest):
        if not _SHA256.fullmatch(value):
            raise ValueError(f"not a sha256: {value!r}")
    return f"{DATA}/{digest[:16]}/{place_inside(entry)}"


def place_inside(entry: Mapping[str, Any]) -> str:
    """The place of a shipped file in its folder, a relative path. Raises ValueError for one that leads out of it."""
    if not entry.get("folder"):
        return os.path.basename(str(entry["name"])) or "data"
    parts = str(entry["inside"]).split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(f"not a usable place: {entry['inside']!r}")
    return "/".join(parts)
