"""Atomic reading and writing of a run's folder on the controller. JSON for people; no pickle, no database."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from homelab.errors import HomelabError, InputError, did_you_mean
from homelab.node.files import objects
from homelab.runs.paths import RunPaths

# One path component that cannot climb (twin of `homelab.node.paths.checked`).
USABLE_NAME = r"\w[\w.-]*"

README = """This folder is one run of homelab.

run.json         what never changes: the resolved recipe, the data's digests, versions, git revision
cluster.json     the cluster as it was at launch
plan.txt         the newest plan, for people; attempts/<n>/plan.json is the same as data
commands.sh      what was executed on each node, runnable by hand (secrets masked)
preflight.json   the checks this run was started with, and which were skipped
events.jsonl     what happened, one JSON object per line
supervisor.json  what the supervisor of this run is doing, and the restarts it has made (supervisor.log: its words)
supervised.json  the node that the supervisor is on, where it is not this machine (--supervise head)
state.json       the state as this controller last saw it (the truth is on the nodes)
metrics.jsonl    the metrics of all ranks, gathered from the nodes by `homelab status`
attempts/<n>/    one start of torchrun on all nodes (diagnosis.json: why it failed); recovery makes the next
code/            the recipe (and script) as it was at launch

On the nodes, <workdir>/runs/<this name>/ also holds attempts/<n>/nodes/<node>/ (torchrun's and every rank's logs),
attempts/<n>/ranks/<rank>/ (metrics, heartbeat, the samples trained on), checkpoints/, tensorboard/ and final/ (on the head).
"""


def write_text(path: Path, text: str) -> None:
    """Write beside `path` and put it in place with one rename."""
    partial = path.with_name(f".{path.name}.partial.{os.getpid()}")
    with _written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # A file name may hold bytes that are no UTF-8; in JSON the escape of such a character is the character.
            with partial.open("w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """What the disk refuses, as an error a person can mend."""
    try:
        yield
    except OSError as error:
        folder = next((parent for parent in path.absolute().parents if parent.exists()), path.parent)
        raise HomelabError(
            f"it cannot be written: {error.strerror}",
            where=str(path),
            hint=f"df -h {shlex.quote(str(folder))}; ls -ld {shlex.quote(str(folder))}",
        ) from error


def copy(source: Path, target: Path) -> None:
    """Copy a file into a run's folder."""
    with _written(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of readable JSON."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The value, or None when the file is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object; an empty one when the file is missing, broken or holds something else."""
    value = read_json(path)
    return value if isinstance(value, dict) else {}


def append_lines(path: Path, values: list[dict[str, Any]]) -> None:
    """Append JSON objects, one per line."""
    if not values:
        return
    with _written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write("".join(json.dumps(value, sort_keys=True, ensure_ascii=False) + "\n" for value in values))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a .jsonl file, none when it cannot be read; a line cut short by a crash, or broken in another way, is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []
    return list(objects(lines))


def event(paths: RunPaths, what: str, **details: Any) -> None:
    """Write down that something happened, now."""
    append_lines(paths.events_jsonl, [{"time": time.time(), "what": what, **details}])


def events(paths: RunPaths) -> list[dict[str, Any]]:
    """What happened, in order of time; what has no time is left out."""
    found = [line for line in read_lines(paths.events_jsonl) if isinstance(line.get("time"), int | float)]
    return sorted(found, key=lambda line: float(line["time"]))


def add_events(paths: RunPaths, new: list[dict[str, Any]]) -> None:
    """Write down what was written down elsewhere. Two machines never write at the same instant, so the time tells what is known."""
    known = {line["time"] for line in events(paths)} if new else set()
    append_lines(paths.events_jsonl, [line for line in new if line["time"] not in known])


def set_state(paths: RunPaths, state: str, attempt: int, *, intent: str | None = None) -> None:
    """Write down the state as the controller sees it now.

    `intent` is what only the controller knows: that it is shipping, or that a stop is under way. It stays until the next
    attempt or the next intent.
    """
    if intent is None:
        intent = intent_of(paths, attempt)
    write_json(paths.state_json, {"state": state, "attempt": attempt, "intent": intent, "updated_at": time.time()})


def intent_of(paths: RunPaths, attempt: int) -> str | None:
    """What the controller was about to do in this attempt; None when nothing was written down about it."""
    found = read_object(paths.state_json)
    return found.get("intent") if found.get("attempt") == attempt else None


def new_name(label: str, now: float, taken: set[str]) -> str:
    """`2026-11-21-1405-llama7b-lora`, with -2, -3 ... when that is taken. The label loses whatever is no good in a folder name."""
    slug = re.sub(r"[^\w.-]+", "-", label).strip("-.")[:40] or "run"
    base = f"{time.strftime('%Y-%m-%d-%H%M', time.localtime(now))}-{slug}"
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    return name


def runs_in(folder: Path) -> list[RunPaths]:
    """The runs of this controller folder, newest first. A copy that somebody named "... (copy)" is none."""
    if not folder.is_dir():
        return []
    found = [
        RunPaths(path) for path in folder.iterdir() if re.fullmatch(USABLE_NAME, path.name) and (path / "run.json").is_file()
    ]
    return sorted(found, key=lambda paths: (paths.run_json.stat().st_mtime, paths.name), reverse=True)


def choose(name: str, known: list[str]) -> str | None:
    """The run meant by `name`: itself, or the only one that starts or ends with it; None when there is none.

    Raises InputError when several are meant.
    """
    if name in known or not name:
        return name or None
    near = [run for run in known if run.startswith(name) or run.endswith(name)]
    if len(near) > 1:
        raise InputError(
            f'"{name}" can mean {len(near)} runs',
            where=", ".join(near[:5]),
            hint="give more of the name; homelab runs lists them",
        )
    return near[0] if near else None


def unknown(name: str, known: list[str]) -> InputError:
    """The error for a run that nobody knows."""
    return InputError(
        f'no run is called "{name}".{did_you_mean(name, known)}',
        where="this controller and the reachable nodes",
        hint="homelab runs",
    )
