"""What a rank's card holds beside torch's own memory: CUDA's context with the kernels it has loaded, and NCCL's buffers.

It depends on the card, the driver and the builds of the libraries, and nobody can tell it beforehand. So it is measured while a run
trains, and the next plan reckons with it in place of its guesses.
"""

from __future__ import annotations

from homelab.worker.task import Task

HELD = "held by others"  # as `homelab.planning.memory` calls it
_LEAST_BYTES = 128 << 20  # a context alone takes more


def beside_torch_bytes(task: Task) -> int | None:
    """Measured now, on this rank's card. None where it cannot be told: on a CPU, where the plan did not know the card's memory, and with
    paged state of the optimizer, some of which lies on the card and may leave it.
    """
    if task.device != "cuda" or task.section("train")["optimizer"] == "paged_adamw_8bit":
        return None
    import torch

    (entry,) = (entry for entry in task.plan["ranks"] if entry["rank"] == task.rank)
    known = entry.get("memory") or {}
    total = known.get("available_bytes")
    if total is None:
        return None
    held = sum(item["size_bytes"] for item in known["items"] if item["name"] == HELD)
    free, _ = torch.cuda.mem_get_info()
    return rest(total, held=held, free=free, torchs=torch.cuda.memory_reserved())


def rest(total: int, *, held: int, free: int, torchs: int) -> int | None:
    """What is left of a card's bytes without what others `held` before, what is `free` now and what is torch's; None where that is too
    little to be true: others have freed theirs meanwhile."""
    found = total - held - free - torchs
    return found if found >= _LEAST_BYTES else None
