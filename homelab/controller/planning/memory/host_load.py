"""What reading a base model needs of a machine's own memory, where its cards get their parts from there (zero3, fsdp, hsdp). Pure.

Files in the training's precision are mapped: all ranks of a machine share the pages, and the kernel may drop them (measured: 3 MB beside the pages
for a model of 269 MB). Other numbers are made while they are read, by each rank for itself: 4 bytes a weight for full training.
"""

from __future__ import annotations

from homelab.controller.base.errors import InputError
from homelab.controller.base.units import gigabytes
from homelab.controller.planning import machines
from homelab.controller.planning.advice.reproducibility import own_dtype
from homelab.controller.planning.job import TrainingJob
from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.memory.activations import width

_STORED = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def rank_bytes(job: TrainingJob) -> int:
    """Bytes that one rank makes while it reads; 0 where the model's shape is not known, and for a quantised base, which goes to the card."""
    method = job.recipe.method
    if job.shape is None or method.quantisation is not None:
        return 0
    if method.kind == "full":
        return rank_memory.TRAINED_BYTES * job.shape.total
    return 0 if own_dtype(job.machines.facts) == _STORED[job.precision] else width(job.precision) * job.shape.total


def refuse(job: TrainingJob, name: str) -> None:
    """Raises InputError for a machine whose memory does not hold what its ranks make. `name`: of the strategy."""
    made = rank_bytes(job)
    for node in job.machines.nodes if made and job.machines.device == "cuda" else ():
        facts, count = job.machines.facts.get(node.name), job.machines.ranks_on(node)
        if facts is None:
            continue
        total, held = machines.host_memory(facts.system)
        if total is not None and count * made > total - held:
            raise InputError(
                f'strategy = "{name}" reads the model into the memory of each machine before the cards get their parts: {node.name} needs '
                f"{gigabytes(count * made)} GB for that, and {gigabytes(total - held)} GB are free",
                where=f"node {node.name}, memory", hint='free memory there; or kind = "lora" on a model in 16 bits, whose files are mapped and need none',
            )  # fmt: skip
