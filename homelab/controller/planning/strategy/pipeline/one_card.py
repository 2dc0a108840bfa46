"""What a pipeline is compared with: one card alone, with the frozen layers that have no room on it in the host's memory. Pure.

Every pass sends those layers over PCIe twice, forward and backward. The best case is counted: the transfer runs while the card computes. homelab itself
does not train so.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from homelab.controller.base.units import gigabytes
from homelab.controller.planning.machines.machines import RankSlot
from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.strategy import ranks
from homelab.controller.planning.strategy.pipeline.micro_batching import MicroBatching
from homelab.controller.planning.types import FewerNodes
from homelab.controller.planning.work.job import TrainingJob

PCIE_BYTES_PER_S = 12e9  # pinned memory over PCIe 3.0 with 16 lanes: 15.75 GB/s by the standard, less its packets' headers; assumed
_MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class OneCard:
    """A card alone: bytes of its layers in the host's memory, of how many, and the tokens of a second at best."""

    node: str
    offloaded_bytes: int
    layers_bytes: int
    tokens_per_s: float

    def against(self, tokens_per_s: float) -> str:
        """In words, beside what the pipeline does."""
        how = "which has room for the whole model"
        if self.offloaded_bytes:
            offloaded = f"{gigabytes(self.offloaded_bytes, '.2g')} of {gigabytes(self.layers_bytes, '.2g')} GB"
            how = f"with {offloaded} of its layers in host memory, at {PCIE_BYTES_PER_S / 1e9:.0f} GB/s of PCIe (assumed)"
        return f"{self.node} alone, {how}: {self.tokens_per_s:.0f} tokens/s at best; as a pipeline {tokens_per_s:.0f}"

    def instead_of(self, tokens_per_s: float) -> FewerNodes | None:
        """This card in place of a pipeline of so many tokens per second, if it holds the whole model and is faster."""
        if self.offloaded_bytes or self.tokens_per_s <= tokens_per_s:
            return None
        because = f"alone it does {self.tokens_per_s:.0f} tokens/s, as a pipeline all do {tokens_per_s:.0f}"
        return FewerNodes(nodes=(self.node,), edit=f"stay on {self.node}", because=because)


def fastest(job: TrainingJob) -> OneCard | None:
    """The card that does it best alone; None on CPUs, without known speeds, and where all weights are trained: those cannot stay in the host's memory."""
    if job.machines.device != "cuda" or job.shape is None or job.workload.speeds.speeds is None or job.recipe.method.kind == "full":
        return None
    cards = [
        card
        for slot in job.machines.slots
        for rows in _MICRO_BATCHES
        if rows <= job.recipe.train.global_batch and (card := _alone(job, slot, rows))
    ]
    return max(cards, key=lambda card: card.tokens_per_s, default=None)


def _alone(job: TrainingJob, slot: RankSlot, rows: int) -> OneCard | None:
    """With micro-batches of so many rows; None where even what must be on the card has no room, or its memory is not known."""
    shape, method, available_bytes = job.shape, job.recipe.method, slot.memory()[0]
    if shape is None or available_bytes is None:
        return None
    without_one = dataclasses.replace(shape, layers=shape.layers - 1)
    layer_bytes = rank_memory.base_weight_bytes(shape, method, job.precision) - rank_memory.base_weight_bytes(
        without_one, method, job.precision
    )
    layers_bytes = shape.layers * layer_bytes
    setup = dataclasses.replace(ranks.setup_of(job, slot, rows), world_size=1)
    needed_bytes = sum(item.size_bytes for item in rank_memory.estimate(shape, method, job.recipe.train, setup))
    # Two layers are on the card at any time: the one that computes, and the one that comes.
    lacking_bytes = max(0, needed_bytes - available_bytes)
    if lacking_bytes:
        lacking_bytes += 2 * layer_bytes
    if lacking_bytes > layers_bytes:
        return None
    assert job.workload.speeds.speeds is not None
    speed, passes = job.workload.speeds.speeds[slot.node.name][slot.local_rank], MicroBatching(job, rows).passes
    transfer_s = 2 * lacking_bytes / PCIE_BYTES_PER_S
    seconds = speed.step_s + sum(max(speed.pass_s(tokens), transfer_s) for tokens in passes)
    return OneCard(slot.node.name, lacking_bytes, layers_bytes, sum(passes) / seconds)
