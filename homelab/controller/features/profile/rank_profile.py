"""profile.json of one rank, as its node has written it (`homelab.worker.profiling.summarise`). Pure. Its words are for a terminal: they are cleaned here."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from homelab.controller.base.models import WireModel
from homelab.controller.base.sanitize import plain_text
from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.types import Plan
from homelab.shared.protocol.memory_items import EXCHANGED, GATHERED

Word = Annotated[str, Field(max_length=400), AfterValidator(plain_text)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(allow_inf_nan=False)]

# What torch's allocator holds at the peak; the process and the CUDA context are beside it.
_HELD_BY_TORCH = (*rank_memory.SEEN_BY_A_DRY_RUN, GATHERED, EXCHANGED)


class CallPlace(WireModel):
    """From where an operator was called: a module's path, its class and "file.py:line" of its forward, or a phase of the step. `share` of its time."""

    module: Word
    class_name: Annotated[Word, Field(alias="class")] = ""
    source: Word = ""
    share: Share


class OperatorRow(WireModel):
    """One operator in all profiled steps. `self_s`: without the operators that it calls; `device_s`: on the card; `share` of the steps' time."""

    name: Word
    calls: Count
    self_s: Share
    device_s: Seconds
    share: Share
    places: Annotated[tuple[CallPlace, ...], Field(max_length=10)] = ()


class ExchangeRow(WireModel):
    """One bucket, gather or scatter in all profiled steps. `sent_bytes`: what this rank sends, without headers; `overlap_s`: while it computes."""

    name: Word
    kind: Word
    calls: Count
    payload_bytes: Count
    sent_bytes: Count
    seconds: Share
    overlap_s: Seconds


class MemoryLine(WireModel):
    """Bytes held over time: (seconds since the first profiled step, bytes). `peak_phase`: of the step, "" where in none."""

    points: Annotated[tuple[tuple[Share, int], ...], Field(max_length=2000)] = ()
    peak_bytes: Count | None = None
    peak_s: Share | None = None
    peak_phase: Word = ""


class RankProfile(WireModel):
    """One rank. Sums are over all profiled steps. `times`: beginning and end of each, Unix seconds; `usual_step_s`: of steps before them."""

    rank: Count
    node: Word
    attempt: Annotated[int, Field(ge=1)]
    device: Word
    strategy: Word
    world_size: Annotated[int, Field(ge=1)]
    torch: Word
    steps: Annotated[tuple[Count, ...], Field(min_length=1, max_length=100)]
    step_s: Annotated[tuple[Seconds, ...], Field(min_length=1, max_length=100)]
    times: Annotated[tuple[tuple[Seconds, Seconds], ...], Field(max_length=100)] = ()
    usual_step_s: Seconds | None = None
    phases: dict[Word, Share] = {}
    operators: Annotated[tuple[OperatorRow, ...], Field(max_length=100)] = ()
    exchanges: Annotated[tuple[ExchangeRow, ...], Field(max_length=10_000)] = ()
    memory: MemoryLine = MemoryLine()


def predicted_bytes(plan: Plan, rank: int) -> int | None:
    """The peak of what torch holds on this rank, as the plan says it; None where it does not."""
    memory = next((one.memory for one in plan.ranks if one.rank == rank), None)
    return sum(item.size_bytes for item in memory.items if item.name in _HELD_BY_TORCH) or None if memory else None
