"""Checkpoints as folders: step-00000020/, complete only when its manifest is. Files only; what is in them is the trainer's.

    checkpoints/.step-00000020.<pid>.partial/   being written, or being removed
    checkpoints/step-00000020/                  renamed there in one piece, with complete.json written and fsynced last
    checkpoints/.step-00000020.corrupt/         found damaged and replaced by a whole one; the newest such is kept, as evidence

Nothing is ever loaded without its manifest: sizes and sha256 of all files, and the fingerprint of recipe and data.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from homelab.worker import fence
from homelab.worker.errors import WorkerError

MANIFEST = "complete.json"
SCHEMA = 1
_FULL_BYTES = 1 << 20  # a disk with less than this free has refused a write


def folder_name(step: int) -> str:
    """step-00000020 for step 20: sorts by name as by number."""
    return f"step-{step:08d}"


def write(
    root: Path,
    step: int,
    recipe_hash: str,
    writers: Mapping[str, Callable[[Path], None]],
    *,
    attempt: int | None = None,
) -> Path:
    """Write one checkpoint: every writer gets the path of its file. Returns the folder.

    Until the last rename nothing under the final name exists, so a crash or a full disk leaves the older checkpoints as they were.
    `attempt` stands in the manifest, and is looked at before the end: raises WorkerError when a newer one has replaced it (`fence`).
    """
    partial = root / f".{folder_name(step)}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        files = {}
        for name, writer in writers.items():
            writer(partial / name)
            _sync(partial / name)
            files[name] = {"bytes": (partial / name).stat().st_size, "sha256": file_sha256(partial / name)}
        manifest = {
            "schema": SCHEMA,
            "step": step,
            "recipe_hash": recipe_hash,
            "attempt": attempt,
            "files": files,
            "time": time.time(),
        }
        if attempt is not None:
            fence.check(root.parent, attempt)
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        _sync(partial / MANIFEST)
        return put(partial, root, step)
    except WorkerError:
        raise
    except Exception as error:  # the libraries that write have errors of their own
        why = disk_fault(error, root)
        if why is None:
            raise
        raise unwritable(root, step, why) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def put(partial: Path, root: Path, step: int, *, is_corrupt: bool = False) -> Path:
    """Rename a folder that is whole, all of its files fsynced, to its place; the folder. Raises OSError.

    One that lies there was left by an earlier attempt that got further than the resume step, and goes; `is_corrupt`: it is kept aside.
    """
    target = root / folder_name(step)
    _sync(partial)
    # A rename cannot replace a folder that has files.
    old = root / f".{folder_name(step)}.{os.getpid()}.old"
    if target.exists():
        if is_corrupt:
            clear_corrupt(root)
            old = root / f".{folder_name(step)}.corrupt"
        os.replace(target, old)
    os.replace(partial, target)
    _sync(root)
    if not is_corrupt:
        shutil.rmtree(old, ignore_errors=True)
    return target


def clear_corrupt(root: Path) -> None:
    """Remove what was kept aside as evidence."""
    for folder in root.glob(".step-*.corrupt"):
        shutil.rmtree(folder, ignore_errors=True)


def disk_fault(error: Exception, root: Path) -> str | None:
    """Why the disk of `root` has refused a write, in the system's words; None when `error` is about something else."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    told = re.search(r"\(os error (\d+)\)", str(error))  # safetensors' way of saying it
    if told:
        return os.strerror(int(told[1]))
    # torch's zip writer says nothing of the disk.
    return os.strerror(errno.ENOSPC) if shutil.disk_usage(root).free <= _FULL_BYTES else None


def unwritable(root: Path, step: int, why: str) -> WorkerError:
    """The disk does not take a checkpoint: `why` in the system's words."""
    return WorkerError(
        f"the checkpoint of step {step} cannot be written: {why}",
        where=str(root),
        hint="make room on that disk (`df -h` shows it), then `homelab recover`; the older checkpoints are untouched",
    )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest if `folder` looks complete (readable, of the step of its name, every file there with its size), else None. Does not hash."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        whole = all((folder / name).stat().st_size == facts["bytes"] for name, facts in manifest["files"].items())
        # Somebody's copy of one, by another name, is no checkpoint: its step would count twice.
        whole = whole and folder.name == folder_name(manifest["step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if whole and manifest.get("schema") == SCHEMA and bool(manifest["files"]) else None


def verify(folder: Path, recipe_hash: str) -> dict[str, Any]:
    """The manifest of a checkpoint that may be loaded. Raises WorkerError naming the file when anything is missing, cut short or
    altered, and when it belongs to another recipe or other data."""
    hint = f"remove the folder {folder} on this node and run `homelab recover`: it takes the newest good checkpoint of any node"
    if not folder.exists():
        there = complete_steps(folder.parent)
        raise WorkerError(
            "the checkpoint to go on from is not on this node any more: [checkpoint] keep removes old ones as new ones are saved",
            where=str(folder),
            hint=f"`homelab recover` goes on from the newest of any node; by hand: set resume_step in this attempt's plan.json on every node to"
            f" one of those here: {', '.join(map(str, there)) or 'none is left'}",
        )
    if not (folder / MANIFEST).is_file():
        raise WorkerError("the checkpoint is not complete: it has no manifest", where=str(folder / MANIFEST), hint=hint)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
        step, found_hash, schema = manifest["step"], manifest["recipe_hash"], manifest["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorkerError(
            f"the manifest of the checkpoint cannot be read: {error}", where=str(folder / MANIFEST), hint=hint
        ) from error
    if schema != SCHEMA or folder.name != folder_name(step):
        raise WorkerError(f"the manifest is of step {step}, schema {schema}", where=str(folder / MANIFEST), hint=hint)
    if found_hash != recipe_hash:
        raise WorkerError(
            f"the checkpoint belongs to another recipe or other data (fingerprint {found_hash}, this run has {recipe_hash})",
            where=str(folder),
            hint="a changed [model], [data], [method] or [train] is a new training: launch it as a new run",
        )
    for name, facts in files.items():
        path = folder / name
        if not path.is_file():
            raise WorkerError("a file of the checkpoint is missing", where=str(path), hint=hint)
        if path.stat().st_size != facts["bytes"]:
            seen = f"a file of the checkpoint has {path.stat().st_size} bytes instead of {facts['bytes']}"
            raise WorkerError(seen, where=str(path), hint=hint)
        if file_sha256(path) != facts["sha256"]:
            raise WorkerError("a file of the checkpoint was altered: its sha256 differs", where=str(path), hint=hint)
    return manifest


def complete_steps(root: Path) -> list[int]:
    """Steps with a checkpoint that looks complete, oldest first."""
    found = (read_manifest(folder) for folder in sorted(root.glob("step-*")))
    return sorted(manifest["step"] for manifest in found if manifest)


def retain(root: Path, keep: int, *, newest: int | None = None) -> list[Path]:
    """Remove all but the newest `keep` complete checkpoints (at least one stays) and return what was removed.

    Folders without a good manifest are left alone here: they may be somebody's evidence, and they never count as a checkpoint.
    Nor do those after step `newest`, the one just written: an earlier attempt left them, and this one did not go on from there
    because they are damaged. By their names alone they would outlive every good one.
    """
    surplus = [step for step in complete_steps(root) if newest is None or step <= newest][: -max(keep, 1)]
    removed = [root / folder_name(step) for step in surplus]
    for folder in removed:
        # Renamed first: a removal that is interrupted leaves neither what looks like a damaged checkpoint nor what nobody clears away.
        partial = root / f".{folder.name}.{os.getpid()}.partial"
        os.replace(folder, partial)
        shutil.rmtree(partial)
    return removed


def clear_partial(root: Path) -> None:
    """Remove what interrupted writes and removals of earlier attempts left behind. Call before any write of this attempt.

    A checkpoint that was moved aside, and whose successor never came, goes back to its place.
    """
    for old in root.glob(".step-*.old"):
        place = root / old.name[1:].split(".")[0]
        if not place.exists():
            os.replace(old, place)
        shutil.rmtree(old, ignore_errors=True)
    for partial in root.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def file_sha256(path: Path) -> str:
    """sha256 of a file's content, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
