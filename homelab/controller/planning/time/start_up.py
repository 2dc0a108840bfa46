"""What a launch costs before its steps have their pace: download, ship, imports, read, quantise, connect, first steps, and what the base reads. Pure.

Nothing of it was measured on the machines of the plan, so that every part has an interval: all at its best, and all at its worst. Each constant has what
it rests on beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from homelab.controller.base.units import listed
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.machines.machines import Machines
from homelab.controller.planning.time import network_cost, step_time
from homelab.controller.planning.time.network_cost import bytes_text
from homelab.controller.planning.types import Choice, StartPart, TimeEstimate
from homelab.controller.planning.work.job import TrainingJob
from homelab.shared.protocol.quantisation import INT8, NF4, NF4_BYTES


class Span(NamedTuple):
    """The best, the usual and the worst of something."""

    best: float
    usual: float
    worst: float


# Assumed, because nobody measures a way to the internet: 1 Gbit/s, 100 and 25 Mbit/s.
_INTERNET_BYTES_PER_S = Span(125e6, 12.5e6, 3.1e6)
# Assumed: an NVMe disk, a slower one, a SATA disk that reads while it is asked for more.
_DISK_BYTES_PER_S = Span(3e9, 1.2e9, 0.4e9)
# Interpreter, torch, transformers and peft: 6 to 9 s on two cores, measured at recoveries; a first start reads them from the disk.
_IMPORTS_S = Span(5.0, 8.0, 25.0)
# Of bitsandbytes on one core, measured; a card takes what PCIe brings, 2 bytes a weight at 4 GB/s (assumed).
_QUANTISED_PER_S_AND_CORE, _QUANTISED_PER_S_ON_CARD = {NF4: 3e7, INT8: 1e8}, 2e9
# A group of gloo takes 0.1 to 0.8 s (measured), torchrun's meeting about a second. NCCL's set-up on home machines is assumed.
_CONNECT_S = {"cpu": Span(0.5, 2.0, 10.0), "cuda": Span(2.0, 5.0, 30.0)}
# Beyond what these steps take later. CUDA loads a kernel when it is used first, and the allocator gets its memory then: assumed.
_FIRST_STEPS_S = {"cpu": Span(0.0, 1.0, 10.0), "cuda": Span(1.0, 5.0, 30.0)}
_REFERENCE_SPREAD = (0.7, 1.5)  # assumed; on two cores it took 0.9 of the usual
_CONTROLLER_WORST = 5  # times as slow as the wire between nodes: a laptop on Wi-Fi sends from there
_CODE_BYTES = 4e5  # the package as it is shipped
_HIDDEN_S = 0.5  # a shorter part is not worth a word


def with_start(time: TimeEstimate, job: TrainingJob, inputs: PlanInputs, part: float) -> TimeEstimate:
    """The estimate with its start, which the hours hold from now on. `part`: of the model, what the ranks of one node read."""
    parts = (*_parts(job, inputs, part), *_reference(job, time))
    low, usual, high = (sum(of) for of in zip(*((part.seconds_low, part.seconds, part.seconds_high) for part in parts), strict=True))
    hours = {
        name: (before * 3600 + seconds) / 3600
        for name, before, seconds in (
            ("hours", time.hours, usual),
            ("hours_low", time.hours_low, low),
            ("hours_high", time.hours_high, high),
        )
        if before is not None
    }
    return time.model_copy(update={"start": parts, "start_s": usual, "start_s_low": low, "start_s_high": high, **hours})


def choices(time: TimeEstimate | None) -> list[Choice]:
    """What every part of the start rests on."""
    parts = time.start if time is not None else ()
    return [
        Choice(
            subject=f"start: {part.name}",
            value=f"{part.seconds:.2g} s ({part.seconds_low:.2g} to {part.seconds_high:.2g})",
            because=part.because,
        )
        for part in parts
    ]


def _parts(job: TrainingJob, inputs: PlanInputs, part: float) -> Iterator[StartPart]:
    machines, device = job.machines, job.machines.device
    model_bytes = _model_bytes(job)
    without = [name for name in machines.names if (facts := machines.facts.get(name)) and facts.model is not None and not facts.model.found]
    if without and model_bytes is not None and not job.recipe.model.is_folder:
        because = f"{bytes_text(model_bytes)} of the hub to {listed(without)}, one after the other over one internet connection, which was not measured: 100 Mbit/s assumed"
        yield _part("download", _at(len(without) * model_bytes, _INTERNET_BYTES_PER_S), because)
    shipped = _CODE_BYTES + sum(file.size_bytes or 0 for file in inputs.data.values() if file.hub is None)
    wire = network_cost.wire_between(machines.names, job.throughputs)
    speeds = Span(wire.bytes_per_s, wire.bytes_per_s, wire.bytes_per_s / _CONTROLLER_WORST)
    ship = _part(
        "ship",
        _at(shipped * len(machines.names), speeds),
        f"code and data, {bytes_text(shipped)}, to {len(machines.names)} node{'s' * (len(machines.names) != 1)} at {wire}",
    )
    if ship.seconds > _HIDDEN_S:
        yield ship
    yield _part(
        "imports", _IMPORTS_S, "Python, torch and transformers: 6 to 9 s measured on two cores, longer if the disk has not cached them"
    )
    if model_bytes is not None:
        asked = "" if machines.facts else " (the nodes were not asked for them)"
        fewer = NF4_BYTES / 2 if job.recipe.method.quantisation == NF4 else 1.0  # what is kept of it is read at the next start
        best, usual, worst = _at(part * model_bytes, _DISK_BYTES_PER_S)
        yield _part(
            "read", Span(best * fewer, usual, worst), f"{bytes_text(part * model_bytes)} of weights from the disk{asked}: 1.2 GB/s assumed"
        )
    if job.recipe.method.quantisation is not None and job.shape is not None:
        yield _quantise(job, machines, part)
    if machines.world_size > 1:
        because = (
            "torchrun's rendezvous, then NCCL: assumed"
            if device == "cuda"
            else "torchrun's rendezvous, then gloo: 0.1 to 0.8 s measured for a group"
        )
        yield _part("connect", _CONNECT_S[device], because)
    because = (
        "kernels are loaded and memory is allocated at the first use: assumed"
        if device == "cuda"
        else "the first step is slower than the others: assumed"
    )
    yield _part("first steps", _FIRST_STEPS_S[device], because)


def _reference(job: TrainingJob, time: TimeEstimate) -> Iterator[StartPart]:
    """The pass of the base over all rows, and of judged answers over as many others: its numbers are kept, so only the first attempt pays for it."""
    objective, rows = job.recipe.objective, job.workload.rows
    if objective is None or not objective.compares_with_base or rows.count is None or job.resume_step:
        return
    read = (rows.count + (job.workload.held_out_rows or 0)) * (2 if objective.learns_labels else 1)
    seconds = read * rows.tokens_mean * step_time.FORWARD_PART / time.tokens_per_s
    spread = Span(_REFERENCE_SPREAD[0] * seconds, seconds, _REFERENCE_SPREAD[1] * seconds)
    yield _part(
        "base reads rows", spread, f"{read} rows of about {rows.tokens_mean:.0f} tokens, forward alone: a third of a training step's work"
    )


def _quantise(job: TrainingJob, machines: Machines, part: float) -> StartPart:
    kind = job.recipe.method.quantisation
    assert kind is not None and job.shape is not None
    weights = part * job.shape.quantised_parameters(kind)
    kept_s = 0.0  # NF4 is kept on the node's disk, and made at the first start alone
    if machines.device == "cuda":
        usual_s = weights / _QUANTISED_PER_S_ON_CARD
        best_s = kept_s if kind == NF4 else usual_s / 3
        return _part(
            "quantise",
            Span(best_s, usual_s, 4 * usual_s),
            "on the cards, at the speed of PCIe: 4 GB/s assumed; a 4-bit base is stored for the next start",
        )
    cores = min((max(1, facts.system.cpu_count) for name, facts in machines.facts.items() if name in machines.names), default=4)
    one_s = weights / _QUANTISED_PER_S_AND_CORE[kind]
    best_s = kept_s if kind == NF4 else one_s / cores
    because = f"{_QUANTISED_PER_S_AND_CORE[kind] / 1e6:.0f} million weights a second and core measured, {cores} core{'s' * (cores != 1)}; a 4-bit base is stored for the next start"
    return _part("quantise", Span(best_s, one_s / cores, one_s), because)


def _model_bytes(job: TrainingJob) -> float | None:
    """The files of the base: as a node has them, else 2 bytes a weight; None where neither is known."""
    sizes = [
        facts.model.size_bytes
        for facts in job.machines.facts.values()
        if facts.model is not None and facts.model.found and facts.model.size_bytes
    ]
    if sizes:
        return float(max(sizes))
    return None if job.shape is None else 2.0 * job.shape.total


def _at(size_bytes: float, bytes_per_s: Span) -> Span:
    return Span(*(size_bytes / speed for speed in bytes_per_s))


def _part(name: str, seconds: Span, because: str) -> StartPart:
    return StartPart(name=name, seconds=seconds.usual, seconds_low=seconds.best, seconds_high=seconds.worst, because=because)
