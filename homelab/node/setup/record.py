"""What setup has made on this node: ~/.homelab/setup.json, and the folders that it names.

    ~/.homelab/setup.json    {"folders": [made by setup], "parents": [made around them],
                             "locks": {environment: digest of what is installed, "" while it is being installed},
                             "refs": {file of the hub's cache: [the commit that it named before, the one that setup has written]}}
    ~/.homelab/setup/        uv.whl and the uv in it, requirements.txt, wheels/, partial/ (files that are still coming), lock

A folder is written down before it is made: whatever ends setup, teardown finds all of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.shared.protocol import files
from homelab.shared.protocol.errors import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from homelab.shared.protocol.files import JsonObject

_RECORD = "~/.homelab/setup.json"
_FOLDER = "~/.homelab/setup"


def record_path() -> str:
    """Where the record lies."""
    return os.path.expanduser(_RECORD)


def folder() -> str:
    """Where uv and the wheels lie."""
    return os.path.expanduser(_FOLDER)


def read() -> JsonObject:
    """{"folders": [paths], "parents": [paths], "locks": {path: text}, "refs": {path: [text, text]}}; empty ones where nothing was made."""
    value = files.read_object(record_path()) or {}
    paths = {
        key: [path for path in value.get(key) or [] if isinstance(path, str) and os.path.isabs(path)] for key in ("folders", "parents")
    }
    locks, refs = value.get("locks"), value.get("refs")
    pairs = [(path, commits) for path, commits in (refs if isinstance(refs, dict) else {}).items() if isinstance(commits, list)]
    return {
        **paths,
        "locks": {str(path): str(lock) for path, lock in locks.items()} if isinstance(locks, dict) else {},
        "refs": {path: commits for path, commits in pairs if os.path.isabs(path) and len(commits) == 2},
    }


def write(record: JsonObject) -> None:
    """Store the record. Raises OSError."""
    files.write_json(record_path(), record, 0o600)


def note(path: str) -> JsonObject:
    """The record, with this folder in it, and those above it that setup makes, too. Written before the folder is made. Raises OSError."""
    record = read()
    if path not in record["folders"]:
        home = os.path.expanduser("~")
        above = os.path.dirname(path)
        missing = []
        while not os.path.lexists(above) and above not in (home, "/"):
            missing.append(above)
            above = os.path.dirname(above)
        parents = [parent for parent in missing if parent not in record["parents"]]
        record = {**record, "folders": record["folders"] + [path], "parents": record["parents"] + parents}
        write(record)
    os.makedirs(path, exist_ok=True)
    return record


def note_reference(path: str, commit: str) -> None:
    """Write down that a file of the hub's cache will name this commit, and what it names now; its folder is made. Raises OSError."""
    if not os.path.isdir(os.path.dirname(path)):
        note(os.path.dirname(path))
    made = read()
    now = files.text(path).strip()
    before, written = made["refs"].get(path, (now, now))
    write({**made, "refs": {**made["refs"], path: [before if now == written else now, commit]}})


def restore_references(record: JsonObject) -> None:
    """Let each file of the hub's cache name what it named before setup, unless somebody has changed it since. Raises OSError."""
    for path, (before, written) in record["refs"].items():
        if os.path.isfile(path) and files.text(path).strip() == written:
            files.write_atomic(path, before.encode()) if before else os.unlink(path)


@contextlib.contextmanager
def held() -> Iterator[int]:
    """The lock of setup on this node; its descriptor, for a program that goes on alone. Raises Refusal while another setup works here."""
    note(folder())
    descriptor = os.open(paths.setup_lock(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    except BlockingIOError:
        raise Refusal(
            "another setup is working on this node", where=folder(), hint="wait until it has ended, then: homelab setup", kind="busy"
        ) from None
    finally:
        os.close(descriptor)
