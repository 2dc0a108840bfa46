"""A checkpoint that is whole by its manifest, and that cannot be loaded all the same: found before the ranks meet, and not taken again."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import torch
from safetensors import safe_open

from homelab.worker import checkpoint
from homelab.worker.errors import WorkerError
from homelab.worker.task import Task


class UnloadableError(WorkerError):
    """Every byte is as it was saved, and the program that loads it refuses."""


def refuse(folder: Path, run: str) -> None:
    """Raises UnloadableError naming the file that torch or safetensors will not load. Nothing is executed; tensors are mapped, not read."""
    for path in sorted(folder.iterdir()):
        try:
            if path.suffix == ".pt":
                torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
            elif path.suffix == ".safetensors":
                with safe_open(str(path), framework="pt") as file:
                    list(file.keys())
            elif path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
        except OSError:
            raise
        except Exception as error:  # each library has its own
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UnloadableError(
                f"{path.name} of the checkpoint cannot be loaded: {first[:300]}",
                where=str(path),
                hint=f"homelab recover {run}",
            ) from error


def set_aside(fault: WorkerError, task: Task) -> WorkerError:
    """The error for a node that holds nothing else of this step, and that nobody can give it. What cannot be loaded is moved out of the way.

    Only where an older one can be: if none can, it is this node's programs that cannot, and nothing is touched.
    """
    root, step = task.checkpoints_dir, task.resume_step
    if not isinstance(fault, UnloadableError):
        return fault
    older = next((known for known in reversed(checkpoint.complete_steps(root)) if known < step and _is_good(root, known, task)), None)
    what = f"{fault.message} (the checkpoint of step {step} on {task.node}, whole by its manifest)"
    if older is None:
        hint = (
            f"no older checkpoint on {task.node} can be loaded either, so look at torch there: homelab preflight; and to begin again at step 0:"
            f" move {root} away, then homelab recover {task.run_dir.name} --from-scratch"
        )
        return WorkerError(what, where=fault.where, hint=hint)
    place = root / checkpoint.folder_name(step)
    aside = root / f".{place.name}.corrupt"
    try:
        checkpoint.clear_corrupt(root)
        os.replace(place, aside)
    except OSError as error:
        return WorkerError(what, where=fault.where, hint=f"it cannot be moved ({error.strerror}): remove {place}, then homelab recover {task.run_dir.name}")
    return WorkerError(
        f"{what}; it was set aside",
        where=str(aside / Path(fault.where).name),
        hint=f"homelab recover {task.run_dir.name} goes on from the one before, of step {older}",
    )


def _is_good(root: Path, step: int, task: Task) -> bool:
    folder = root / checkpoint.folder_name(step)
    try:
        checkpoint.verify(folder, task.recipe_hash)
        refuse(folder, task.run_dir.name)
    except (WorkerError, OSError):
        return False
    return True
