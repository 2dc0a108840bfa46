"""Report: everything that `homelab report` shows, as one value. Unknown figures are None, never 0. Pure."""

from __future__ import annotations

from typing import Literal

from homelab.controller.base.models import DisplayValue, Value
from homelab.controller.features.profile.over_ranks import DearOperator, ExchangeOverRanks, MemoryRow


class CurvePoint(Value):
    """A value at a step; always finite."""

    step: int
    value: float


class Series(DisplayValue):
    """One line of a chart. `points` are thinned out by `homelab.controller.features.report.downsampling`, in the order of their steps."""

    label: str
    points: tuple[CurvePoint, ...]


class Curve(DisplayValue):
    """One chart: values in `unit` over the optimizer steps, or over another whole number that `over` names. `note` says what the picture leaves out."""

    name: str
    unit: str
    series: tuple[Series, ...]
    note: str = ""
    over: str = ""


class StepRow(Value):
    """Figures of one step, for the table. `memory_bytes`: the most that any rank has held."""

    step: int
    attempt: int
    loss: float | None = None
    eval_loss: float | None = None
    tokens_per_s: float | None = None
    memory_bytes: int | None = None
    learning_rate: float | None = None


class AttemptRow(DisplayValue):
    """One start on all nodes. Times are seconds since 1970; `from_step` is the step after which it went on, `last_step` the last that counts."""

    number: int
    started_at: float | None
    ended_at: float | None
    state: str
    from_step: int
    last_step: int | None
    nodes: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    title: str = ""
    fix: str = ""


Sort = Literal["attempt", "fault", "rebalance", "other"]


class Happening(DisplayValue):
    """One line of the timeline; `time` in seconds since 1970."""

    time: float
    sort: Sort
    text: str


class ShareRow(DisplayValue):
    """The part of one card or processor in the work. `rank`: in the newest plan, None for one that has only trained before it.

    `planned` and `done` are fractions of the tokens; `tokens` are those of the steps that count.
    """

    rank: int | None
    node: str
    device: str
    planned: float | None
    done: float | None
    tokens: int | None
    tokens_per_s: float | None
    memory_planned_bytes: int | None
    memory_bytes: int | None


class Compared(DisplayValue):
    """One figure of the plan beside what happened; texts with their units, "unknown" where one is not known."""

    what: str
    planned: str
    happened: str


class CardEnergyRow(DisplayValue):
    """One card over all attempts. `kwh` is None where the card does not report its power; `unmeasured_s` is time without samples.

    `tokens` are those of the steps that count; `tokens_per_kwh` only of attempts that were measured.
    """

    node: str
    card: str
    kwh: float | None
    measured_s: float
    unmeasured_s: float
    tokens: int | None
    tokens_per_kwh: float | None
    because: str = ""


class Energy(DisplayValue):
    """What the cards used. `kwh` is the sum of the cards that tell; `is_complete` is False where one does not tell, or not always."""

    cards: tuple[CardEnergyRow, ...] = ()
    kwh: float | None = None
    is_complete: bool = False
    price_per_kwh: float | None = None
    currency: str = ""
    cost: float | None = None
    tokens_per_kwh: float | None = None


class Answered(DisplayValue):
    """One question, as the model answered it before its training and after; None where it was not asked."""

    question: str
    before: str | None
    after: str | None


class Profiled(Value):
    """Some steps under the profiler. `steps` are the first and the last."""

    steps: tuple[int, int]
    ranks: tuple[int, ...]
    operators: tuple[DearOperator, ...]
    exchanges: tuple[ExchangeOverRanks, ...]
    memory: tuple[MemoryRow, ...]


class GivenBackRow(DisplayValue):
    """A node that its owner wanted: how often while the run went on, and for how long in all."""

    node: str
    count: int
    seconds: float


class MachineRow(DisplayValue):
    """One node: its cards or processor as the plan names them, and the versions of its packages."""

    node: str
    devices: tuple[str, ...]
    versions: tuple[str, ...]


class RunReport(DisplayValue):
    """One run. Times are seconds since 1970, `utc_offset_s` is the reader's clock at `made_at`. `missing` says what is not known, and why."""

    run: str
    state: str
    recipe_file: str
    made_at: float
    utc_offset_s: int = 0
    created_at: float | None
    homelab: str
    facts: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]
    curves: tuple[Curve, ...]
    steps: tuple[StepRow, ...]
    step_count: int
    attempts: tuple[AttemptRow, ...]
    timeline: tuple[Happening, ...]
    timeline_left_out: int = 0
    shares: tuple[ShareRow, ...]
    compared: tuple[Compared, ...]
    energy: Energy
    answers: tuple[Answered, ...]
    machines: tuple[MachineRow, ...]
    profiled: Profiled | None = None
    given_back: tuple[GivenBackRow, ...] = ()
