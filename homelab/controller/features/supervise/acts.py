"""What a supervisor does next, as `homelab.controller.features.supervise.step` decides it and `homelab.controller.features.supervise.supervisor` performs it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from homelab.controller.attempt.watchdog import AttemptVerdict
from homelab.controller.features.supervise.observation import Failed


@dataclass(frozen=True)
class Incident:
    """Why an attempt is ended: a failure, or (`verdict` is None) that the nodes `leaving` go to their owner (each with the words for it), that the nodes
    `rejoining` are well again or come from their owner (`returning`), or that another cut of the model trains faster (`recut` says it)."""

    verdict: AttemptVerdict | None
    noticed_at: float  # seconds since 1970
    left_out: frozenset[str]  # nodes that are not asked: they were left out before, and are not well yet
    rejoining: tuple[str, ...] = ()
    recut: str = ""
    leaving: Mapping[str, str] = field(default_factory=dict)
    returning: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The verdict's, "leave", "return", "rejoin", or "recut"."""
        if self.verdict:
            return self.verdict.kind
        return "leave" if self.leaving else "return" if self.returning else "rejoin" if self.rejoining else "recut"

    @property
    def nodes(self) -> tuple[str, ...]:
        """That are to blame, leave, or come back."""
        return self.verdict.nodes if self.verdict else (*self.leaving, *self.rejoining)

    @property
    def because(self) -> str:
        """In words."""
        if self.verdict:
            return self.verdict.because
        well = [name for name in self.rejoining if name not in self.returning]
        said = [*self.leaving.values(), *(f"{name} came back from its owner" for name in self.returning)]
        said += [f"{', '.join(well)} is healthy again"] if well else []
        return "; ".join(said) or self.recut


@dataclass(frozen=True)
class Review:
    """Look once at an attempt that may have ended; the next observation has the verdict."""


@dataclass(frozen=True)
class Follow:
    """Begin to listen to the nodes of the newest plan, and to ask those that were left out whether they are well. Result: `Followed`."""


@dataclass(frozen=True)
class Wait:
    """Until a node says something."""


@dataclass(frozen=True)
class Collect:
    """Gather the run's metrics and write its state down, beside the watching."""


@dataclass(frozen=True)
class Save:
    """Ask the ranks for a checkpoint, beside the watching."""


@dataclass(frozen=True)
class WriteProgress:
    """Write down what is being done."""

    doing: str
    why: str


@dataclass(frozen=True)
class Begin:
    """Say and write down that a recovery begins, and why."""

    incident: Incident


@dataclass(frozen=True)
class Examine:
    """Ask the nodes what happened. Result: `Examined` or `Failed`."""

    incident: Incident


@dataclass(frozen=True)
class Halt:
    """Claim the run, stop what is left of the attempt, find its newest checkpoint. Result: `Halted` or `Failed`.

    `asks_silent`: nodes that were silent at the examination, too.
    """

    may_begin_again: bool
    asks_silent: bool


@dataclass(frozen=True)
class Resume:
    """Start the next attempt, without `exclude`. Result: `Resumed` or `Failed`."""

    because: str
    exclude: tuple[str, ...]
    halvings: Mapping[str, int]  # node -> how often its micro-batch is halved


@dataclass(frozen=True)
class WaitBeforeRetry:
    """`error`: what is in the way, None where that was said before. `is_for_owner`: an owner's wish is, and nothing else: no news to the owner."""

    seconds: float
    error: Failed | None = None
    is_for_owner: bool = False


@dataclass(frozen=True)
class GiveUp:
    """The run has failed. `stops_nodes`: nothing was stopped on the nodes yet."""

    because: str
    hint: str = ""
    cause: str | None = None
    stops_nodes: bool = False


@dataclass(frozen=True)
class End:
    """Nothing more to do. `left_out`: nodes on which a rank may still wait for its peers.

    `why`: is written down, with a last look at the nodes where `collects`; None: what was written down last stays.
    `records_stop`: the run was stopped on another machine.
    """

    how: str
    why: str | None = None
    left_out: frozenset[str] = frozenset()
    collects: bool = False
    records_stop: bool = False


Act = Review | Follow | Wait | Collect | Save | WriteProgress | Begin | Examine | Halt | Resume | WaitBeforeRetry | GiveUp | End
