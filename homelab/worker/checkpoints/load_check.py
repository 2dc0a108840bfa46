"""Detects a checkpoint that is whole by its manifest but cannot be loaded: before the ranks meet, and so that it is not used again."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import torch
from safetensors import safe_open

from homelab.shared.protocol import manifest
from homelab.worker.checkpoints import checkpoint_folder
from homelab.worker.errors import WorkerError
from homelab.worker.runtime.task import Task


class UnloadableError(WorkerError):
    """Every byte is as it was saved, and the library that loads it refuses it."""


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
                f"{path.name} of the checkpoint cannot be loaded: {first[:300]}", where=str(path), hint=f"homelab recover {run}"
            ) from error
    _refuse_missing(folder, run)


def _refuse_missing(folder: Path, run: str) -> None:
    """Raises UnloadableError where the weights are not as many as the optimizer has parameters: a slice of the model is missing, and ranks that
    load a part of the file would not all see it."""
    weights, optimizer = folder / "trainable.safetensors", folder / "optimizer.pt"
    if not (weights.exists() and optimizer.exists()):
        return
    groups = torch.load(optimizer, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(optimizer)).get("param_groups", [])
    trained = sum(len(group.get("params", ())) for group in groups)
    with safe_open(str(weights), framework="pt") as file:
        saved = len(list(file.keys()))
    if trained and saved != trained:
        raise UnloadableError(
            f"{weights.name} of the checkpoint has {saved} tensors, and {optimizer.name} is that of {trained}: a part of the model is missing",
            where=str(weights), hint=f"homelab recover {run}",
        )  # fmt: skip


def set_aside(fault: WorkerError, task: Task) -> WorkerError:
    """The error for a node that holds nothing else of this step, and that nobody can give it. What cannot be loaded is moved out of the way.

    Only where an older one can be: if none can, it is this node's programs that cannot, and nothing is touched.
    """
    root, step = task.checkpoints_dir, task.resume_step
    if not isinstance(fault, UnloadableError):
        return fault
    older = next(
        (
            saved_step
            for saved_step in reversed(checkpoint_folder.complete_steps(root))
            if saved_step < step and _is_good(root, saved_step, task)
        ),
        None,
    )
    problem = f"{fault.message} (the checkpoint of step {step} on {task.node}, complete by its manifest)"
    if older is None:
        hint = (
            f"no older checkpoint on {task.node} can be loaded either, so check torch there: homelab preflight; to start again at step 0:"
            f" move {root} away, then homelab recover {task.run_dir.name} --from-scratch"
        )
        return WorkerError(problem, where=fault.where, hint=hint)
    place = root / manifest.folder_name(step)
    try:
        aside = Path(manifest.set_aside(place))
    except OSError as error:
        return WorkerError(
            problem,
            where=fault.where,
            hint=f"it cannot be moved ({error.strerror}): remove {place}, then homelab recover {task.run_dir.name}",
        )
    return WorkerError(
        f"{problem}; it was set aside",
        where=str(aside / Path(fault.where).name),
        hint=f"homelab recover {task.run_dir.name} continues from the previous one, of step {older}",
    )


def _is_good(root: Path, step: int, task: Task) -> bool:
    folder = root / manifest.folder_name(step)
    try:
        checkpoint_folder.verify(folder, task.recipe_hash)
        refuse(folder, task.run_dir.name)
    except (WorkerError, OSError):
        return False
    return True
