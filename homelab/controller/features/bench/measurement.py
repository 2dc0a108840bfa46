"""What a run has shown, from the lines that its ranks wrote after each step. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from homelab.controller.base.models import Value
from homelab.controller.features.report.curves import by_step
from homelab.shared.protocol.rank_messages import Metric


class Measurement(Value):
    """Steps after the warm-up. `tokens_per_s`: of all ranks, without padding. A step lasts as long as that of its slowest rank.

    compute, wire, wait, input: parts of the steps' time, over all ranks; the wire is what even the last rank waits for, the wait what others
    wait beside it; input, the making of batches, is None where a run's worker did not tell, and part of compute then.
    `memory_bytes`: rank -> most that its process held (a CPU), or torch reserved (a card). `loss`: of the last step, after equal tokens in all cells of a variation.
    """

    steps: int
    tokens: int
    seconds: float
    tokens_per_s: float
    step_s: float
    step_s_low: float
    step_s_high: float
    compute: float
    wire: float
    wait: float
    input: float | None = None
    memory_bytes: dict[str, int]
    loss: float | None


def measure(lines: Sequence[Metric], ranks: int, warmup: int) -> Measurement | None:
    """None where a step lacks a rank, or nothing is left after the warm-up."""
    steps = {step: metrics for step, metrics in by_step(lines).items() if step > warmup}
    if not steps or any(
        len(metrics) != ranks or any(not line.step_s or line.communication_s is None for line in metrics) for metrics in steps.values()
    ):
        return None
    durations = [max(line.step_s or 0.0 for line in metrics) for metrics in steps.values()]
    seconds = sum(durations)
    tokens = sum(line.tokens or 0 for metrics in steps.values() for line in metrics)
    wire = sum(min(line.communication_s or 0.0 for line in metrics) for metrics in steps.values()) / seconds
    waiting = sum(statistics.fmean(line.communication_s or 0.0 for line in metrics) for metrics in steps.values()) / seconds - wire
    inputs = [line.input_s for metrics in steps.values() for line in metrics]
    making = sum(value for value in inputs if value is not None) / ranks / seconds if None not in inputs else None
    memory: dict[str, int] = {}
    for line in lines:
        if line.kind == "train" and line.memory_bytes:
            memory[str(line.rank)] = max(memory.get(str(line.rank), 0), line.memory_bytes)
    last = steps[max(steps)]
    return Measurement(
        steps=len(steps), tokens=tokens, seconds=seconds, tokens_per_s=tokens / seconds, step_s=statistics.median(durations),
        step_s_low=min(durations), step_s_high=max(durations), compute=max(0.0, 1 - wire - waiting - (making or 0.0)), wire=wire, wait=waiting, input=making,
        memory_bytes=memory, loss=next((line.loss for line in last if line.loss is not None), None),
    )  # fmt: skip
