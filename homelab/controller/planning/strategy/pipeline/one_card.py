"""What a pipeline is compared with: one card alone, whose layers without room come from its host's memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from homelab.controller.base.units import gigabytes
from homelab.controller.planning.memory_estimate import StreamingPlan
from homelab.controller.planning.strategy.pipeline import streamed_rank
from homelab.controller.planning.strategy.pipeline.micro_batching import MicroBatching
from homelab.controller.planning.types import FewerNodes
from homelab.controller.planning.work.job import TrainingJob
from homelab.shared.law.streaming import WORDS


@dataclass(frozen=True)
class OneCard:
    """A card alone: what comes from its host (None: nothing), bytes of all layers, and the tokens of a second."""

    node: str
    streaming: StreamingPlan | None
    layers_bytes: int
    tokens_per_s: float

    @property
    def streamed_bytes(self) -> int:
        """Bytes of its layers on the host."""
        return self.streaming.host_bytes if self.streaming else 0

    def against(self, tokens_per_s: float) -> str:
        """In words, beside what the pipeline does."""
        how = "which has room for the whole model"
        if self.streaming is not None:
            streamed = f"{gigabytes(self.streamed_bytes, '.2g')} of {gigabytes(self.layers_bytes, '.2g')} GB"
            how = f"with {streamed} of its layers in its host's {WORDS[self.streaming.host]}, at {self.streaming.rate}"
        return f"{self.node} alone, {how}: {self.tokens_per_s:.0f} tokens/s; as a pipeline {tokens_per_s:.0f}"

    def instead_of(self, tokens_per_s: float) -> FewerNodes | None:
        """This card in place of a pipeline of so many tokens per second, if it is faster."""
        if self.tokens_per_s <= tokens_per_s:
            return None
        streamed = ""
        if self.streaming is not None:
            streamed = f" with {gigabytes(self.streamed_bytes, '.2g')} GB of layers from its host's {WORDS[self.streaming.host]} at {self.streaming.rate}"
        because = f"alone{streamed} it does {self.tokens_per_s:.0f} tokens/s, as a pipeline all do {tokens_per_s:.0f}"
        return FewerNodes(nodes=(self.node,), edit=f"stay on {self.node}", because=because)


def fastest(job: TrainingJob) -> OneCard | None:
    """The card that does it best alone; None on CPUs, without known speeds, and where no layer can come from a host."""
    if job.machines.device != "cuda" or job.shape is None or job.workload.speeds.speeds is None or streamed_rank.why_not(job) is not None:
        return None
    found = [one for slot in job.machines.slots if (one := streamed_rank.fastest_on(job, slot)) is not None]
    cards = [
        OneCard(
            one.slot.node.name, one.streaming, job.shape.layers * streamed_rank.layer_bytes_of(job), sum(MicroBatching(job, one.rows).passes) / one.step_s
        )
        for one in found
    ]  # fmt: skip
    return max(cards, key=lambda card: card.tokens_per_s, default=None)
