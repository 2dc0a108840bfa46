"""What was trained goes from the rank that has it on its disk to the stages, to each only the weights of its own layers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from homelab.worker.checkpoints import weights
from homelab.worker.errors import WorkerError
from homelab.worker.runtime import process_group


def spread(model: Any, folder: Path | None, source: int) -> None:
    """Fill the trained weights of this stage's `model`. `folder`: a checkpoint or final/ on rank `source`, None on the others. Collective.

    Raises WorkerError on every rank when a weight of a stage is not in the folder, or has another shape.
    """
    own = {weights.adapter_name(name): weight for name, weight in weights.trained(model).items()}
    wanted = [
        json.loads(text)
        for text in process_group.exchange("wanted", json.dumps({name: list(weight.shape) for name, weight in own.items()}))
    ]
    if folder is None:
        if fault := process_group.exchange("fault", "")[source]:
            raise WorkerError(
                fault, where=f"rank {source}", hint="the base model on a node is a different one: copy the same model folder to every node"
            )
        for name in sorted(own):
            arriving = torch.zeros(own[name].shape, dtype=torch.float32)
            dist.recv(arriving, source)
            own[name].copy_(arriving)
        return
    with _opened(folder) as files:
        shapes = {name: file.get_slice(key).get_shape() for name, (file, key) in files.items()}
        odd = sorted(name for names in wanted for name, shape in names.items() if shapes.get(name) != shape)
        fault = f"the trained weights do not fit this model: {odd[0]} is missing or has another shape" if odd else ""
        process_group.exchange("fault", fault)
        if fault:
            raise WorkerError(
                fault, where=str(folder), hint="the base model on a node is a different one: copy the same model folder to every node"
            )
        for name in sorted(files):
            file, key = files[name]
            takers = [rank for rank, names in enumerate(wanted) if name in names]
            tensor = file.get_tensor(key).to(torch.float32) if takers else None  # exact: no trained weight has more bits
            for rank in takers:
                assert tensor is not None
                if rank == source:
                    own[name].copy_(tensor)
                else:
                    dist.send(tensor, rank)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[dict[str, tuple[Any, str]]]:
    """Name of each weight -> the file with it, and its key there."""
    checkpoint = folder / weights.WEIGHTS
    paths = [checkpoint] if checkpoint.exists() else sorted(folder.glob("*.safetensors"))
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(str(path), "pt")) for path in paths]
        yield {weights.adapter_name(key): (file, key) for file in files for key in file.keys()}  # noqa: SIM118  # it is no dict
