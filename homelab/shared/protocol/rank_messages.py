"""What one rank of a run writes on its node, and what the node says of it. Times are seconds since 1970 by the node's own clock.

The files of a rank go as they are into the answer of `poll`: a damaged one gives no value there.
"""

from __future__ import annotations

from typing import Annotated

from homelab.shared.protocol.marks import OR_NONE, READABLE, Count, Line, LineOrEmpty, Lines, Moment, Number, Tail
from homelab.shared.protocol.message import Message

DEAD = frozenset(("", "Z", "X"))
"""The kernel's letters for a process that does nothing any more; "" for one that is gone."""


class Heartbeat(Message):
    """heartbeat.json: a rank's sign of life."""

    time: Moment
    # starting | loading | connecting | fetching (a checkpoint, from a peer) | training | saving | evaluating | done
    phase: Line = "starting"
    step: Count = 0
    total_steps: Count | None = None
    step_tokens: Number = None
    done: Number = None  # 0 to 1, where the phase knows its end
    pid: int | None = None


class Metric(Message):
    """One line of metrics.jsonl. Loss is the global mean per token, or of a pair of answers or a judged one; tokens and seconds are this rank's own."""

    kind: str  # train | eval | note | shares | save
    time: Moment = 0.0
    attempt: Count = 0
    rank: Count = 0
    node: LineOrEmpty = ""
    step: Count = 0
    epoch: Number = None
    loss: float | None = None  # not finite where the training has diverged
    eval_loss: float | None = None
    accuracy: Number = None  # the part of the pairs or answers that the model judges rightly
    eval_accuracy: Number = None
    tokens: Count | None = None
    tokens_per_s: Number = None
    learning_rate: Number = None
    compute_s: Number = None
    communication_s: Number = None
    input_s: Number = None
    step_s: Number = None
    memory_bytes: Count | None = None
    share: Count | None = None
    message: Lines = ""


class LogTail(Message):
    """The last lines of what a worker printed."""

    stdout: Tail = ()
    stderr: Tail = ()


class RankError(Message):
    """error.json: what the worker itself wrote down before it ended: what was seen, where, and what fixes it.

    `needs_launch`: the fix changes the recipe, so it is a new training.
    """

    message: Lines
    where: Lines = ""
    hint: Lines = ""
    needs_launch: bool = False


Metrics = Annotated[tuple[Metric, ...], READABLE]


class RankReply(Message):
    """One rank in the answer of `poll`. `metrics` may be only the lines that are newer than those already asked for."""

    heartbeat: Annotated[Heartbeat | None, OR_NONE] = None
    metrics: Metrics = ()
    metrics_end_bytes: Count = 0  # where the last of them ends in the rank's file, for who counts the lines
    before: Metrics = ()  # the curves up to the step from which this attempt went on, where they were asked for
    log_tail: LogTail = LogTail()
    error: Annotated[RankError | None, OR_NONE] = None


class RankStatus(Message):
    """One rank in a line of `follow`. Ages are counted by the node's monotonic clock."""

    pid: int | None = None
    state: str = ""  # the kernel's letter
    phase: str = "absent"  # absent, then those of the heartbeat
    step: Count = 0
    still_s: float = 0.0  # since the last sign of life
    step_still_s: float = 0.0  # since the last step
    error: bool = False

    @property
    def has_begun(self) -> bool:
        """It wrote a heartbeat in this attempt."""
        return self.phase != "absent"

    @property
    def is_dead(self) -> bool:
        """It had begun and its process is gone, before it was done."""
        return self.has_begun and self.phase != "done" and self.state in DEAD
