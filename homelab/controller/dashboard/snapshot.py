"""Snapshot: everything a dashboard shows, as one value."""

from __future__ import annotations

import math

from pydantic import Field

from homelab.controller.base.hint import Options
from homelab.controller.base.models import CommandField, DisplayValue, HintField, Value
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.run.events import Tone
from homelab.controller.run.state import State


class Course(Value):
    """One figure over the last looks, the newest last. None where it was not told."""

    values: tuple[float | None, ...] = ()


class GpuRow(DisplayValue):
    """One card; None where it does not say. `index` is that of its node; the courses and `memory_peak_bytes` are of what was seen while watching."""

    name: str
    index: int = 0
    utilisation_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    memory_peak_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    is_left_out: bool = False  # cluster.toml names other cards of the node
    busy: Course = Course()
    memory: Course = Course()
    temperature: Course = Course()
    power: Course = Course()


class LeftOut(DisplayValue):
    """A node of the cluster that takes no part in this attempt, and why, as far as that was written down."""

    name: str
    because: str = ""


class GivenBack(DisplayValue):
    """A node that is with its owner. `until` as people read it, empty without an end; `because`: why it went by itself, empty where a person said so."""

    name: str
    until: str = ""
    because: str = ""


class NodeRow(DisplayValue):
    """One machine. `torchrun` is "running", "not started", "gone" or how it ended; `why_not`: why it was not asked.

    Of its network: what its cards have carried since it started, and the rates between the last two looks.
    """

    name: str
    reachable: bool
    why_not: str = ""
    address: str = ""
    cpu_load_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    received_bytes: int | None = None
    sent_bytes: int | None = None
    counted_at_s: float | None = None
    received_bytes_per_s: float | None = None
    sent_bytes_per_s: float | None = None
    network: Course = Course()
    gpus: tuple[GpuRow, ...] = ()
    torchrun: str = "not started"
    needs_action: bool = False


class RankRow(DisplayValue):
    """One worker process. Seconds are of its newest step, `tokens_per_s` of the last ones; `heartbeat_age_s` by its node's own clock.

    `communication_s` is `wire_s` + `wait_s` where both are known (`step_parts`).

    `memory_bytes`: the most it ever held, on its card or in the machine.
    """

    rank: int
    node: str
    device: str = ""
    phase: str = ""
    step: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    share: int | None = None
    compute_s: float | None = None
    communication_s: float | None = None
    wire_s: float | None = None
    wait_s: float | None = None
    heartbeat_age_s: float | None = None
    memory_bytes: int | None = None
    log_tail: tuple[str, ...] = ()


class LossPoint(Value):
    """The loss at one step: mean per token over the global batch."""

    step: int
    loss: float


class EventRow(DisplayValue):
    """Something that happened to the run, in the controller's clock."""

    time: float
    text: str
    tone: Tone = ""


class NextCommand(DisplayValue):
    """What a person may type now, and what it is for."""

    purpose: str
    command: CommandField

    def with_options(self, options: Options) -> NextCommand:
        """The same with the options that its reader needs."""
        return self.model_copy(update={"command": self.command.with_options(options)})


class Snapshot(DisplayValue):
    """A run at one moment. `eta_s` is None while it cannot be estimated; `started_at` is that of the attempt, by the clock of a node.

    `running_s`: for how long the attempt has been under way by the clock of its nodes, None where that cannot be told. `step_s` is that of
    the last steps of all together. Efficiencies are fractions of the sum of the ranks' speeds alone: what is reached, what the plan promised;
    `is_efficiency_measured`: those speeds were measured, not guessed.
    """

    run: str
    state: State
    recipe: str
    attempt: int
    started_at: float | None
    now: float
    running_s: float | None = None
    step_s: float | None = None
    epoch: float | None = None
    efficiency: float | None = None
    planned_efficiency: float | None = None
    is_efficiency_measured: bool = False
    checkpoint_age_s: float | None = None
    restarts: int = 0
    left_out: tuple[LeftOut, ...] = ()
    given_back: tuple[GivenBack, ...] = ()
    waits_for_owner: bool = False
    """Nothing trains before a node of `given_back` returns, or another one does."""
    total_steps: int | None
    step: int
    loss: float | None
    eval_losses: tuple[LossPoint, ...] = ()
    accuracy: float | None = None
    """The part of the pairs whose better answer the model finds better, or of judged answers that are on their right side, in the last step; None where tokens are
    learned."""
    eval_accuracy: float | None = None
    """The same of the held-out pairs."""
    eta_s: float | None = None
    tokens_per_s: float | None = None
    loss_history: tuple[LossPoint, ...] = ()
    nodes: tuple[NodeRow, ...] = ()
    ranks: tuple[RankRow, ...] = ()
    events: tuple[EventRow, ...] = ()
    notes: tuple[HintField, ...] = ()
    checkpoint_steps: tuple[int, ...] = ()
    next_commands: tuple[NextCommand, ...] = ()
    diagnosis: Diagnosis | None = None
    supervisor: str = ""
    """What the run's supervisor (here, on a node or elsewhere) is doing, with its reason; empty where none is seen."""
    stopped_owner: HintField | None = None
    """That a signal has stopped who holds the run, and the command that lets it go on; None where that is not so."""
    is_over: bool = Field(default=False, exclude=True)
    """Nothing more will happen by itself, as far as was seen up to now."""

    @property
    def best_eval(self) -> LossPoint | None:
        """The lowest held-out loss; None where there is none that is a number (a training that diverges writes others)."""
        return min((point for point in self.eval_losses if math.isfinite(point.loss)), key=lambda point: point.loss, default=None)

    def with_options(self, options: Options) -> Snapshot:
        """The same, in which the commands of ours have the options that its reader needs."""
        return self.model_copy(update={
            "notes": tuple(note.with_options(options) for note in self.notes),
            "stopped_owner": self.stopped_owner and self.stopped_owner.with_options(options),
            "next_commands": tuple(entry.with_options(options) for entry in self.next_commands),
            "diagnosis": self.diagnosis and self.diagnosis.with_options(options),
        })  # fmt: skip
