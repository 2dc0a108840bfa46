"""The parts of `scripts/bench gpu`, the most telling first: one call is the first of them that fit into its time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """`module` of this folder has measure(place). It is not begun with less than `least_s` left, and ended after `limit_s`."""

    name: str
    title: str
    least_s: int
    limit_s: int

    @property
    def module(self) -> str:
        """What `python -m` runs."""
        return f"benchmarks.gpu_parts.{self.name}"


# What nobody has seen on a card comes first; from `objectives` on, parts were measured once. One part at a time: a rank that waits in NCCL keeps
# the card busy, and products of another process beside it had 1 % of their speed (measured).
PARTS = (
    Part("streaming", "layers from the host: bits, bytes per second, seconds and memory of a step", 45, 240),
    Part("mixtures", "routed experts in 4 bits: codes, products, seconds of an expert, a training divided in two", 45, 300),
    Part("recovery", "a killed rank, with a process that waits for its place and without one", 60, 240),
    Part("parting", "who waits over NCCL for a peer that is gone saves its last whole step when it is told to end", 45, 240),
    Part("stages", "a pipeline: does it end, is it the training of one process, are its seconds its own, on a full card", 60, 300),
    Part("shards", "sharded trainings: the law, memory while they load, resume, shares beside a late rank", 60, 300),
    Part("objectives", "pairs and labels: losses in fp32 beside a CPU's, in bf16, with bases of 4 bits", 60, 200),
    Part("eightbit", "a base of 8 bits: codes and loss beside a CPU's, speed and memory beside 4 and 16 bits", 30, 150),
    Part("evening", "preflight, launch, a killed rank, recover, chat, merge, gguf and report, as a person types them", 90, 420),
    Part("held", "bytes of the context and of each communicator; what open receives cost", 20, 120),
    Part("card", "homelab bench card: tokens per second beside the data sheet's guess, and the row for the table", 45, 240),
    Part("law", "the same losses and weights however a batch is divided, in fp32, bf16 and fp16", 60, 300),
    Part("nccl", "how long survivors hold on when a peer dies, and what a start sends and holds", 60, 300),
    Part("speed", "tokens per second of the worker, beside TRL where it is installed; each switch off in turn", 90, 420),
    Part("restart", "when the memory of a killed rank is free again; what a start consists of", 40, 240),
    Part("memory", "what a step really takes against what the plan says; the context; gaps of the allocator", 60, 240),
    Part("clock", "whether a slow peer moves the seconds of this rank's passes", 40, 120),
    Part("attention", "milliseconds and bytes of the attention kernels, masked and packed", 20, 120),
    Part("fp16", "an overflow on one rank: all skip the same step", 20, 90),
    Part("optim", "an optimizer step: foreach, fused, 8 bits", 20, 90),
    Part("norm", "the norm of a gradient on different layouts; what a digest of the weights costs", 10, 60),
)
