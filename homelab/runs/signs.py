"""What a node says while a run is followed (`homelab.node.follow` writes these lines; here they get types)."""

from __future__ import annotations

from homelab.facts import Loose
from homelab.runs.reply import ExitOrNone

STOPPED = frozenset("Tt")
DEAD = frozenset({"", "Z", "X"})


class RankSign(Loose):
    """One worker process. `still_s`: how long it has given no sign (`homelab.node.follow`), by the node's monotonic clock."""

    pid: int | None = None
    state: str = ""  # the kernel's letter; "" gone
    phase: str = "absent"  # absent, then those of the heartbeat
    step: int = 0
    still_s: float = 0.0
    error: bool = False

    @property
    def has_begun(self) -> bool:
        """It wrote a heartbeat in this attempt."""
        return self.phase != "absent"

    @property
    def is_dead(self) -> bool:
        """It had begun and its process is gone, before it was done."""
        return self.has_begun and self.phase != "done" and self.state in DEAD


class Sign(Loose):
    """One node. `heard_s` is how long ago the line came, by the controller's monotonic clock (set there)."""

    attempt: int
    newest: int = 0
    started: bool = False
    stopping: bool = False  # a stop was asked for: `homelab.node.watch.mark_stop` comes before any signal
    agent: str = ""
    torchrun: str = ""
    exit: ExitOrNone = None
    checkpoint: int = 0  # step of the newest one that is complete on this node
    ranks: dict[int, RankSign] = {}
    missing_s: dict[str, float] = {}  # node that this one once reached -> for how long it has not any more (`homelab.node.peers`)
    heard_s: float = 0.0
