"""Checkpoints as folders: step-00000020/, complete only when its manifest is. Files only; what is in them is the trainer's.

`homelab.shared.protocol.manifest` has the names of the folders. Nothing is loaded without its manifest: sizes and sha256 of all files, and the
fingerprint of recipe and data.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from homelab.shared.protocol import manifest
from homelab.shared.protocol.digest import file_sha256
from homelab.shared.protocol.files import sync
from homelab.shared.protocol.manifest import MANIFEST, SCHEMA, folder_name
from homelab.worker.checkpoints import fencing
from homelab.worker.errors import WorkerError, disk_fault


def write(root: Path, step: int, recipe_hash: str, writers: Mapping[str, Callable[[Path], object]], *, attempt: int | None = None) -> Path:
    """Write one checkpoint: every writer gets the path of its file. Returns the folder.

    Until the last rename nothing under the final name exists, so a crash or a full disk leaves the older checkpoints as they were.
    `attempt` is written into the manifest. Raises WorkerError when a newer attempt has replaced it (`fencing`), and where the disk is full.
    """
    partial = root / f".{folder_name(step)}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        files = {}
        for name, writer in writers.items():
            writer(partial / name)
            sync(partial / name)
            files[name] = {"bytes": (partial / name).stat().st_size, "sha256": file_sha256(partial / name)}
        content = {"schema": SCHEMA, "step": step, "recipe_hash": recipe_hash, "attempt": attempt, "files": files, "time": time.time()}
        if attempt is not None:
            fencing.check(root.parent, attempt)
        (partial / MANIFEST).write_text(json.dumps(content, indent=2), encoding="utf-8")
        sync(partial / MANIFEST)
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
    sync(partial)
    # A rename cannot replace a folder that has files.
    old = root / f".{folder_name(step)}.{os.getpid()}.old"
    if target.exists():
        if is_corrupt:
            manifest.clear_corrupt(root)
            old = root / f".{folder_name(step)}.corrupt"
        os.replace(target, old)
    os.replace(partial, target)
    sync(root)
    if not is_corrupt:
        shutil.rmtree(old, ignore_errors=True)
    return target


def unwritable(root: Path, step: int, why: str) -> WorkerError:
    """The error for a disk that refuses a checkpoint; `why` is the text of the system."""
    return WorkerError(
        f"the checkpoint of step {step} cannot be written: {why}",
        where=str(root),
        hint="make room on that disk (`df -h` shows it), then `homelab recover`; the older checkpoints are untouched",
    )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest if `folder` looks complete (readable, of the step of its name, every file there with its size), else None. Does not hash."""
    content = manifest.read(folder)
    # A copy of a checkpoint by another name does not count: its step would count twice.
    if content is None or manifest.manifest_fault(content, folder) or folder.name != folder_name(content["step"]):
        return None
    return None if any(manifest.size_fault(folder, name, part) for name, part in content["files"].items()) else content


def verify(folder: Path, recipe_hash: str) -> dict[str, Any]:
    """The manifest of a checkpoint that may be loaded. Raises WorkerError naming the file when anything is missing, cut short or
    altered, and when it belongs to another recipe or other data."""
    hint = f"remove the folder {folder} on this node and run `homelab recover`: it uses the newest complete checkpoint of any node"
    if not folder.exists():
        steps = complete_steps(folder.parent)
        raise WorkerError(
            "the checkpoint to continue from is no longer on this node: [checkpoint] keep removes old ones when new ones are saved",
            where=str(folder),
            hint=f"`homelab recover` continues from the newest of any node; by hand: set resume_step in this attempt's plan.json on every node to"
            f" one of those here: {', '.join(map(str, steps)) or 'none is left'}",
        )
    if not (folder / MANIFEST).is_file():
        raise WorkerError("the checkpoint is not complete: it has no manifest", where=str(folder / MANIFEST), hint=hint)
    try:
        content: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = dict(content["files"])
        step, own_hash, schema = content["step"], content["recipe_hash"], content["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorkerError(f"the manifest of the checkpoint cannot be read: {error}", where=str(folder / MANIFEST), hint=hint) from error
    if schema != SCHEMA or folder.name != folder_name(step):
        raise WorkerError(f"the manifest is of step {step}, schema {schema}", where=str(folder / MANIFEST), hint=hint)
    if own_hash != recipe_hash:
        raise WorkerError(
            f"the checkpoint belongs to another recipe or other data (fingerprint {own_hash}, this run has {recipe_hash})",
            where=str(folder),
            hint="a changed [model], [data], [method] or [train] is a new training: launch it as a new run",
        )
    for name, facts in files.items():
        path = folder / name
        if not path.is_file():
            raise WorkerError("a file of the checkpoint is missing", where=str(path), hint=hint)
        if path.stat().st_size != facts["bytes"]:
            message = f"a file of the checkpoint has {path.stat().st_size} bytes instead of {facts['bytes']}"
            raise WorkerError(message, where=str(path), hint=hint)
        if file_sha256(path) != facts["sha256"]:
            raise WorkerError("a file of the checkpoint was altered: its sha256 differs", where=str(path), hint=hint)
    return content


def complete_steps(root: Path) -> list[int]:
    """Steps with a checkpoint that looks complete, oldest first."""
    manifests = (read_manifest(folder) for folder in root.glob("step-*"))
    return sorted(content["step"] for content in manifests if content)


def retain(root: Path, keep: int, *, newest: int | None = None, is_kept: Callable[[int], bool] = lambda step: False) -> list[Path]:
    """Remove all but the newest `keep` complete checkpoints (at least one stays) and return what was removed. Those of steps that `is_kept` names stay.

    Folders without a good manifest stay: they may be evidence, and they never count as a checkpoint.
    Nor do those after step `newest`, the one just written: an earlier attempt left them, and this one did not go on from there
    because they are damaged. By their names alone they would outlive every good one.
    """
    steps = [step for step in complete_steps(root) if newest is None or step <= newest]
    surplus = [step for step in steps[: -max(keep, 1)] if not is_kept(step)]
    removed = [root / folder_name(step) for step in surplus]
    for folder in removed:
        # Renamed first: an interrupted removal leaves a partial folder, which the next attempt removes, and not a damaged checkpoint.
        partial = root / f".{folder.name}.{os.getpid()}.partial"
        os.replace(folder, partial)
        shutil.rmtree(partial)
    return removed


def clear_partial(root: Path) -> None:
    """Remove what interrupted writes and removals of earlier attempts left behind. Call before any write of this attempt.

    A checkpoint that was moved aside and was not replaced goes back to its place.
    """
    for old in root.glob(".step-*.old"):
        place = root / old.name[1:].split(".")[0]
        if not place.exists():
            os.replace(old, place)
        shutil.rmtree(old, ignore_errors=True)
    for partial in root.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)
