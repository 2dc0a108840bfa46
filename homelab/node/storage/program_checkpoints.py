"""Checkpoints of a program of one's own ([script], `homelab run`), in whatever format it writes them.

saved/checkpoint-120/, saved/step_40.pt    written by the program into HOMELAB_CHECKPOINT_DIR; HOMELAB_LAST_CHECKPOINT is the newest at its start
checkpoints/step-00000120/saved.tar        the newest of them in one file with a manifest, made once nothing of the run is left:
                                           it is verified, chosen and sent to other nodes as every checkpoint
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile

from homelab.node.system import processes
from homelab.shared.protocol import files, layout, manifest
from homelab.shared.protocol.digest import file_sha256

ARCHIVE = "saved.tar"
LAST = "HOMELAB_LAST_CHECKPOINT"
_KEPT = 2
_UNPACKED = ".unpacked-"  # in the folder of the program's checkpoints; then the step
# What a power cut leaves, with the number of the process that was at work.
_HALF_KEPT, _EVER_UNPACKED = re.compile(r"\.step-\d+\.(\d+)\.partial"), re.compile(re.escape(_UNPACKED) + r"\d+(?:\.(\d+))?")
# The last number of a name is the step: checkpoint-120, epoch_3, step-40.pt. Hidden ones, and those that are being written, do not count.
_NAME = re.compile(r"[A-Za-z][\w.-]*?(\d+)(\.[A-Za-z]\w*)?")
_UNFINISHED = (".tmp", ".part", ".partial", ".incomplete")
# transformers' Trainer (5.23, trainer.py: _save_checkpoint) writes into the folder of the final name; this is the last file that it writes.
_OF_TRAINER, _LAST_OF_TRAINER = re.compile(r"checkpoint-\d+"), "trainer_state.json"


def keep(folder: str) -> dict[int, str]:
    """Make the newest complete checkpoint of the program one of the run in `folder`. Step -> why it could not be, {} where it is or where there is none."""
    _clear(os.path.join(folder, layout.CHECKPOINTS), _HALF_KEPT)
    last = newest(folder)
    if last is None or last[0] in manifest.steps(folder):
        return {}
    step, name = last
    place = manifest.folder_of(folder, step)
    root, final_name = os.path.split(place)
    partial = os.path.join(root, f".{final_name}.{os.getpid()}.partial")
    try:
        os.makedirs(partial)
        path = os.path.join(partial, ARCHIVE)
        with tarfile.open(path, "w") as archive:
            archive.add(os.path.join(saved_folder(folder), name), arcname=name)
        files.sync(path)  # its manifest is on the disk, and would speak for a part of it after a power cut
        described = files.read_object(os.path.join(folder, layout.RUN_JSON)) or {}
        entry = {"bytes": os.path.getsize(path), "sha256": file_sha256(path)}
        said = {"schema": manifest.SCHEMA, "step": step, "recipe_hash": described.get("recipe_hash"), "files": {ARCHIVE: entry}}
        files.write_json(os.path.join(partial, manifest.MANIFEST), said)
        shutil.rmtree(place, ignore_errors=True)  # without a manifest, or it would be among the steps
        os.replace(partial, place)
        files.sync(root)
    except OSError as error:
        return {step: f"{name} of the program cannot be kept: {error.strerror or error}"}
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for old in manifest.steps(folder)[:-_KEPT]:
        shutil.rmtree(manifest.folder_of(folder, old), ignore_errors=True)
    return {}


def set_all_aside(folder: str) -> None:
    """Move all checkpoints of the run in `folder` out of the way, those of its program, too. Raises OSError."""
    kept, saved = manifest.steps(folder), saved_folder(folder)
    of_program = [name for name in (os.listdir(saved) if os.path.isdir(saved) else []) if step_of(name)]
    if not kept and not of_program:
        return
    unused = os.path.join(folder, layout.UNUSED)
    if os.path.isdir(unused):
        shutil.rmtree(unused)
    if kept:
        os.replace(os.path.join(folder, layout.CHECKPOINTS), unused)
    os.makedirs(unused, exist_ok=True)
    for name in of_program:
        os.replace(os.path.join(saved, name), os.path.join(unused, name))
    files.sync(folder)


def restore(folder: str, step: int) -> None:
    """Before an attempt: the program finds the checkpoint of `step` and no newer one, on every node the same; for step 0 it finds none.

    Newer ones are hidden (a name with a dot), and the hidden ones of the attempt before are removed. Raises OSError, ValueError for a damaged archive.
    """
    saved = saved_folder(folder)
    os.makedirs(saved, exist_ok=True)
    for name in os.listdir(saved):
        if name.startswith(".unused-"):
            _remove(os.path.join(saved, name))
    for name in os.listdir(saved):
        its_step = step_of(name)
        if its_step is not None and its_step > step:
            os.replace(os.path.join(saved, name), os.path.join(saved, f".unused-{name}"))
    try:
        if not _is_wanted(folder, step):
            return
        ready = os.path.join(saved, f"{_UNPACKED}{step}")
        if not os.path.isdir(ready):
            unpack(folder, step)
        for name in os.listdir(ready):
            new, place = os.path.join(ready, name), os.path.join(saved, name)
            _keep_own_files(place, new)
            _remove(place)
            os.replace(new, place)
    finally:
        _clear(saved, _EVER_UNPACKED)


def unpack(folder: str, step: int) -> None:
    """Unpack the checkpoint of `step` where the program of the run in `folder` does not have it: `restore` gives it its name then.

    That takes minutes for many gigabytes, and needs no lock: no program looks at it before. Raises OSError, ValueError for a damaged archive.
    """
    if not _is_wanted(folder, step):
        return
    ready = os.path.join(saved_folder(folder), f"{_UNPACKED}{step}")
    partial = f"{ready}.{os.getpid()}"
    try:
        _unpacked(os.path.join(manifest.folder_of(folder, step), ARCHIVE), partial)
        _remove(ready)
        os.replace(partial, ready)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_wanted(folder: str, step: int) -> bool:
    """Whether the run has a checkpoint of `step` that its program lacks."""
    if not step or not os.path.isfile(os.path.join(manifest.folder_of(folder, step), ARCHIVE)):
        return False
    saved = saved_folder(folder)
    names = os.listdir(saved) if os.path.isdir(saved) else []
    return not any(step_of(name) == step and _is_complete(saved, name) for name in names)


def newest(folder: str) -> tuple[int, str] | None:
    """(step, name) of the complete checkpoint with the highest step that the program of the run has written; None without one."""
    saved = saved_folder(folder)
    names = os.listdir(saved) if os.path.isdir(saved) else []
    steps = [(step, name) for name in names if (step := step_of(name)) and _is_complete(saved, name)]
    return max(steps, default=None)


def last_path(folder: str) -> str:
    """What the program of the run may go on from, behind `restore`; "" where it has saved nothing."""
    last = newest(folder)
    return os.path.join(saved_folder(folder), last[1]) if last else ""


def is_program(folder: str) -> bool:
    """Whether the run in `folder` is a program of one's own."""
    recipe = (files.read_object(os.path.join(folder, layout.RUN_JSON)) or {}).get("recipe")
    return isinstance(recipe, dict) and bool(recipe.get("script"))


def step_of(name: str) -> int | None:
    """The last number of a name; None for a name that is no checkpoint's."""
    match = None if name.endswith(_UNFINISHED) else _NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def saved_folder(folder: str) -> str:
    """HOMELAB_CHECKPOINT_DIR of the run in `folder`."""
    return os.path.join(folder, layout.SAVED)


def _is_complete(saved: str, name: str) -> bool:
    path = os.path.join(saved, name)
    if not os.path.isdir(path):
        return os.path.isfile(path)
    return os.path.exists(os.path.join(path, _LAST_OF_TRAINER)) if _OF_TRAINER.fullmatch(name) else bool(os.listdir(path))


def _unpacked(path: str, target: str) -> None:
    """Unpack an archive of `keep`, which has one entry, into the folder `target`, which is made. Raises ValueError for another, and entries that climb."""
    names = set()
    with tarfile.open(path, "r") as archive:
        for member in archive:
            parts = member.name.split("/")
            if not (member.isfile() or member.isdir()) or ".." in parts or not parts[0]:
                raise ValueError(f"unexpected entry in {path}: {member.name!r}")
            names.add(parts[0])
            place = os.path.join(target, *parts)
            if member.isdir():
                os.makedirs(place, exist_ok=True)
                continue
            os.makedirs(os.path.dirname(place), exist_ok=True)
            source = archive.extractfile(member)
            assert source is not None  # it is a file
            with open(place, "wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
                out.flush()
                os.fsync(out.fileno())
    if len(names) != 1:
        raise ValueError(f"{path} has {len(names)} checkpoints")


def _keep_own_files(old: str, new: str) -> None:
    """What only this node has of an incomplete folder stays: the Trainer writes each rank's random state on the rank's node."""
    for name in os.listdir(old) if os.path.isdir(old) and os.path.isdir(new) else ():
        if os.path.isfile(os.path.join(old, name)) and not os.path.lexists(os.path.join(new, name)):
            os.replace(os.path.join(old, name), os.path.join(new, name))


def _clear(root: str, pattern: re.Pattern[str]) -> None:
    """Remove what is called so in a folder, but for that of a process that is still at work on it."""
    for name in os.listdir(root) if os.path.isdir(root) else ():
        match = pattern.fullmatch(name)
        if match and not (match[1] and processes.is_alive(int(match[1]))):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
