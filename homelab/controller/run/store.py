"""Atomic reading and writing of a run's folder on the controller. JSON for people; no pickle, no database."""

from __future__ import annotations

import contextlib
import errno
import getpass
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from homelab.controller.base import secrets
from homelab.controller.base.errors import HomelabError
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import files, layout

README = """This folder is one run of homelab.

run.json         what never changes: the resolved recipe, the data's digests, versions, git revision
cluster.json     the cluster as it was at launch
adopted.json     which nodes have said what this run is, where another machine has launched it
plan.txt         the newest plan, for people; attempts/<n>/plan.json is the same as data
commands.sh      what was executed on each node, runnable by hand (secrets masked)
preflight.json   the checks this run was started with, and which were skipped
events.jsonl     what happened, one JSON object per line
supervisor.json  what the supervisor of this run is doing, and the restarts it has made (supervisor.log: its words)
supervised.json  the node that the supervisor is on, where it is not this machine (--supervise head)
state.json       the state as this controller last saw it (the truth is on the nodes)
metrics.jsonl    the metrics of all ranks, gathered from the nodes by `homelab status`
attempts/<n>/    one start of torchrun on all nodes (diagnosis.json: why it failed); recovery makes the next
energy.json      what each card used in each attempt, as the nodes said it for a report
answers.jsonl    what `homelab chat --prompt` asked the model, and what it said
tracking/        what trackers got of it (tensorboard/: event files), each step once
profiles/        what `homelab profile` has fetched: a trace and a summary for each profiled rank
code/            the recipe (and script) as it was at launch

On the nodes, <workdir>/runs/<this name>/ also holds attempts/<n>/nodes/<node>/ (torchrun's and every rank's logs),
attempts/<n>/ranks/<rank>/ (metrics, heartbeat, the samples trained on), checkpoints/, profiles/, tensorboard/ and final/ (on the head).
"""

# What later commands go by, word for word. All else tells people what happened: a secret that a program has printed stays out of it.
_WORD_FOR_WORD = (layout.RUN_JSON, "cluster.json", layout.PLAN_JSON)

# Every folder of a run has it.
_OF_A_RUN = layout.RUN_JSON

# File -> why this process could not write it. A run continues when a file that only informs people cannot be written.
UNWRITTEN: dict[Path, HomelabError] = {}


def write_text(path: Path, text: str) -> None:
    """Write beside `path` and put it in place with one rename, without secrets that are known here. Raises HomelabError where the disk refuses."""
    text = text if path.name in _WORD_FOR_WORD else secrets.hide(text)
    with disk_errors_as_hints(path):
        is_new = not path.parent.exists()
        if path.name == _OF_A_RUN:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            keep_private(path.parent)
        try:
            # A file name may hold bytes that are no UTF-8; in JSON the escape of such a character is the character.
            files.write_atomic(path, text.encode("utf-8", "backslashreplace"), 0o666)
        except OSError:
            if is_new:  # an attempt's number counts as used where its folder is
                with contextlib.suppress(OSError):
                    path.parent.rmdir()
            raise


@contextlib.contextmanager
def disk_errors_as_hints(path: Path) -> Iterator[None]:
    """What the disk refuses, as an error a person can fix."""
    try:
        yield
    except OSError as error:
        raise HomelabError(
            f"it cannot be written: {error.strerror or error}", where=str(path), hint=disk_error_hint(path, error)
        ) from error


@contextlib.contextmanager
def best_effort_write(path: Path) -> Iterator[None]:
    """Around a write that only informs people: if the disk refuses it, `UNWRITTEN` keeps the error, and the work goes on.

    Files that a later command relies on (a plan, run.json) need `disk_errors_as_hints`: there the disk must be fixed first.
    """
    try:
        with disk_errors_as_hints(path):
            yield
    except HomelabError as error:
        UNWRITTEN[path] = error


def disk_error_hint(path: Path, error: OSError) -> str:
    """The command after which `path` can be written, as far as what the system says of it tells."""
    absolute = path.absolute()
    folder = next((parent for parent in absolute.parents if os.path.isdir(parent)), absolute.parent)
    # A folder where a file belongs, or a file where a folder does.
    inverted = next(
        (part for part in (*reversed(absolute.parents), absolute) if os.path.exists(part) and os.path.isdir(part) == (part == absolute)),
        None,
    )
    quoted = shlex.quote(str(folder))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"make room on that disk; what is large there: df -h {quoted}; du -xh -d 1 {shlex.quote(str(_mount(folder)))} | sort -h | tail"
        )
    if inverted not in (None, absolute) and not any(os.path.lexists(parent / _OF_A_RUN) for parent in inverted.parents):
        # Outside of a run's folder it is not homelab's file: it may be data of a person, or a device.
        return (
            f"{shlex.quote(str(inverted))} is no folder: choose another folder for the runs, with --runs-dir DIR or export HOMELAB_RUNS=DIR"
        )
    if inverted == absolute and not any(os.path.lexists(parent / _OF_A_RUN) for parent in inverted.parents):
        return f"it is a folder: name a file in it, like {shlex.quote(str(inverted / 'FILE'))}"
    if inverted is not None:
        return f"move that file away: mv {shlex.quote(str(inverted))} {shlex.quote(f'{inverted}.damaged')}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"sudo chown -R {shlex.quote(getpass.getuser())} {quoted} && chmod -R u+rwX {quoted}"
    if error.errno == errno.EROFS:
        return f"sudo mount -o remount,rw {shlex.quote(str(_mount(folder)))} (the kernel makes a failing disk read-only: sudo dmesg | tail)"
    return f"df -h {quoted}; ls -ld {quoted}"


def _mount(folder: Path) -> Path:
    """Where the file system of `folder` begins."""
    return next((part for part in (folder, *folder.parents) if os.path.ismount(part)), folder)


def copy(source: Path, target: Path) -> None:
    """Copy a file into a run's folder."""
    with disk_errors_as_hints(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of readable JSON."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The value, or None when the file is missing or broken, or no file: a pipe would be waited for."""
    return files.read_json(path)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object; an empty one when the file is missing, broken or holds something else."""
    value = read_json(path)
    return value if isinstance(value, dict) else {}


def write_lines(path: Path, values: Iterable[dict[str, Any]]) -> None:
    """`write_text` of JSON objects, one per line, never all of them in memory at once."""
    with disk_errors_as_hints(path):
        texts = (secrets.hide(json.dumps(value, sort_keys=True, ensure_ascii=False)) + "\n" for value in values)
        files.write_atomic(path, (text.encode("utf-8", "backslashreplace") for text in texts), 0o666)


def append_lines(path: Path, values: list[dict[str, Any]]) -> None:
    """Append JSON objects, one per line, to a file that people are only told by (`told`)."""
    if not values:
        return
    with best_effort_write(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", encoding="utf-8", errors="backslashreplace") as stream:
            end = stream.seek(0, os.SEEK_END)
            whole = end == 0 or os.pread(stream.fileno(), 1, end - 1) == b"\n"  # not after a disk that was full in the middle of a line
            lines = "".join(json.dumps(value, sort_keys=True, ensure_ascii=False) + "\n" for value in values)
            stream.write(("" if whole else "\n") + secrets.hide(lines))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a .jsonl file, none when it cannot be read; a line cut short by a crash, or broken in another way, is left out."""
    if not os.path.isfile(path):  # a pipe would be waited for
        return []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []
    return files.json_objects(lines)


def set_state(paths: RunPaths, state: str, attempt: int, *, intent: str | None = None) -> None:
    """Write down the state as the controller sees it now.

    `intent` is what only the controller knows: that it is shipping, or that a stop is under way. It stays until the next
    attempt or the next intent. Where the disk refuses it, the nodes know all of it but the intent of shipping.
    """
    if intent is None:
        intent = intent_of(paths, attempt)
    with best_effort_write(paths.state_json):
        write_json(paths.state_json, {"state": state, "attempt": attempt, "intent": intent, "updated_at": time.time()})


def intent_of(paths: RunPaths, attempt: int) -> str | None:
    """What the controller was about to do in this attempt; None when nothing was written down about it."""
    record = read_object(paths.state_json)
    return record.get("intent") if record.get("attempt") == attempt else None


def state_of(paths: RunPaths, attempt: int) -> str | None:
    """The state in which this attempt was seen last; None when nothing was written down about it."""
    record = read_object(paths.state_json)
    state = record.get("state")
    return state if record.get("attempt") == attempt and isinstance(state, str) else None


def new_name(label: str, now: float, taken: set[str]) -> str:
    """`2026-11-21-1405-llama7b-lora`, with -2, -3 ... when that is taken. The label loses whatever is no good in a folder name."""
    slug = re.sub(r"[^\w.-]+", "-", label).strip("-.")[:40] or "run"
    base = f"{time.strftime('%Y-%m-%d-%H%M', time.localtime(now))}-{slug}"
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    return name


def take_name(folder: Path, label: str, now: float, taken: set[str]) -> str:
    """`new_name`, and its folder made in `folder`: two that launch at the same moment never have the same. Raises HomelabError."""
    while True:
        name = new_name(label, now, taken)
        with disk_errors_as_hints(folder / name):
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            try:
                os.mkdir(folder / name, 0o700)
                return name
            except FileExistsError:
                taken = taken | {name}
            except FileNotFoundError:  # another process has just released the only name in it
                continue


def keep_private(folder: Path) -> None:
    """Let nobody else into a run's folder, whatever umask made it: it holds a person's data, program and answers."""
    with contextlib.suppress(OSError):  # of another user, or on a disk that keeps no modes
        state = os.stat(folder)
        if state.st_uid == os.geteuid() and state.st_mode & 0o077:
            os.chmod(folder, 0o700)


def give_back(folder: Path, name: str) -> None:
    """A name of which nothing has come: its folder, and that of all runs where it is the only one."""
    with contextlib.suppress(OSError):
        if not os.path.exists(folder / name / layout.RUN_JSON):
            (folder / name / layout.SUPERVISOR_JSON).unlink(missing_ok=True)  # who was launching it
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(folder / name)
        os.rmdir(folder)


def runs_in(folder: Path) -> list[RunPaths]:
    """The runs of this controller folder, newest first. A copy with a name like "... (copy)" is not a run."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise HomelabError(
            f"the runs in it cannot be listed: {error.strerror}", where=str(folder), hint=disk_error_hint(folder / "run", error)
        ) from error
    runs = []
    for name in names:
        paths = RunPaths(folder / name)
        # A folder of another user that cannot be read is not a run of this user.
        if layout.is_usable(name) and os.path.isfile(paths.run_json):
            keep_private(paths.root)
            runs.append((os.path.getmtime(paths.run_json), name, paths))
    return [paths for _, _, paths in sorted(runs, key=lambda entry: entry[:2], reverse=True)]
