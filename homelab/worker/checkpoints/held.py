"""A checkpoint that is read while its run trains on: it stays whole although [checkpoint] keep removes it meanwhile.

checkpoints/.step-00000020.<pid>.held/step-00000020/   hard links to its files, as long as they are read; no byte is copied

Seen on a card: with a checkpoint every second, `homelab chat`, `merge` and `gguf` of a run that trains lost it between looking and loading.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from homelab.shared.protocol.manifest import folder_name
from homelab.worker.checkpoints import checkpoint_folder
from homelab.worker.errors import WorkerError

_TRIES = 5  # each finds a newer checkpoint: the run saves faster than links are made


@contextlib.contextmanager
def newest(root: Path, recipe_hash: str, *, least: int = 0) -> Iterator[Path]:
    """The folder of the newest complete checkpoint below `root`, verified, of step `least` where it is there, else of a later one; it stays as it is in the block.

    Raises WorkerError where there is none, where it is damaged, and where the run had to take it back because its disk was full.
    """
    folder, own = _taken(root, least)
    try:
        _verify(folder, root / folder.name, recipe_hash)
        yield folder
    except (FileNotFoundError, WorkerError) as error:
        if folder.is_dir():
            raise
        raise WorkerError(
            "the checkpoint was removed while it was read: the disk is full, and the run that trains comes first",
            where=str(root / folder.name),
            hint="make room on that disk (`df -h` shows it), then repeat the command",
        ) from error
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


def _verify(folder: Path, place: Path, recipe_hash: str) -> None:
    """Raises WorkerError as `checkpoint_folder.verify`, in whose words the checkpoint lies at `place`: the links are gone when they are read."""
    try:
        checkpoint_folder.verify(folder, recipe_hash)
    except WorkerError as error:
        own, real = str(folder), str(place)
        raise WorkerError(error.message, where=error.where.replace(own, real), hint=str(error.hint).replace(own, real)) from error


def _taken(root: Path, least: int) -> tuple[Path, Path | None]:
    """(checkpoint, folder to remove afterwards). The checkpoint itself, and None, on a disk that has no hard links."""
    take_back(root, unless_read=True)  # who is killed while it reads leaves links, which cost a checkpoint once the run has removed its own
    for _ in range(_TRIES):
        steps = [step for step in checkpoint_folder.complete_steps(root) if step >= least]
        if not steps:
            break
        source = root / folder_name(least if least in steps else steps[-1])
        own = root / f".{source.name}.{os.getpid()}.held"
        shutil.rmtree(own, ignore_errors=True)
        try:
            (own / source.name).mkdir(parents=True)
            for file in source.iterdir():
                os.link(file, own / source.name / file.name)
        except FileNotFoundError:  # removed at this moment
            shutil.rmtree(own, ignore_errors=True)
            continue
        except OSError:
            shutil.rmtree(own, ignore_errors=True)
            return source, None
        if checkpoint_folder.read_manifest(own / source.name) is not None:
            return own / source.name, own
        shutil.rmtree(own, ignore_errors=True)
    raise WorkerError(
        "this run has no complete checkpoint on this node",
        where=str(root),
        hint="wait for the next checkpoint (`homelab status` shows the step), then repeat the command",
    )


def clear(root: Path) -> None:
    """Before an attempt writes: remove what interrupted writes, removals and readers of earlier ones have left behind."""
    checkpoint_folder.clear_partial(root)
    take_back(root, unless_read=True)


def take_back(root: Path, *, unless_read: bool) -> None:
    """Remove what readers hold. `unless_read`: only what a reader that was killed has left behind."""
    for own in root.glob(".step-*.held"):
        if not (unless_read and is_alive(own.name.split(".")[2])):
            shutil.rmtree(own, ignore_errors=True)


def is_alive(pid: str) -> bool:
    """Whether a process of this machine has this number, as the name of a folder gives it."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ValueError, OSError):
        return False
    return True
