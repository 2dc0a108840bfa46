"""What a rank's card holds beside torch's own memory: CUDA's context with the kernels it has loaded, and NCCL's buffers.

It depends on the card, the driver and the builds of the libraries, and cannot be predicted. A run measures it, and the next plan uses the
measurement in place of its guesses.
"""

from __future__ import annotations

from homelab.shared.protocol.memory_items import HELD
from homelab.worker.runtime.task import Task

_LEAST_BYTES = 128 << 20  # a context alone takes more


def beside_torch_bytes(task: Task) -> int | None:
    """Bytes on this rank's card now. None where they cannot be measured: on a CPU, where the plan did not know the card's memory, and with a
    paged optimizer, whose state may leave the card.
    """
    if task.device != "cuda" or task.train.optimizer == "paged_adamw_8bit":
        return None
    import torch

    estimate = task.ranks[task.rank].memory or {}
    total = estimate.get("available_bytes")
    if total is None:
        return None
    held_bytes = sum(item["size_bytes"] for item in estimate["items"] if item["name"] == HELD)
    free, _ = torch.cuda.mem_get_info()
    return rest(total, held=held_bytes, free=free, torchs=torch.cuda.memory_reserved())


def rest(total: int, *, held: int, free: int, torchs: int) -> int | None:
    """What is left of a card's bytes without what others `held` before, what is `free` now and what is torch's; None where that is too
    little to be true: others have freed theirs meanwhile."""
    beside_torch = total - held - free - torchs
    return beside_torch if beside_torch >= _LEAST_BYTES else None
