"""Is the attempt well? Pure: from what each node said last, and how long ago, to one verdict. No clock of its own.

Told apart: a rank that died, a rank that is frozen, a node that is gone, a hang in which everybody waits; and what is no trouble at
all: a rank that computes slowly (a sign per pass), a node that the controller cannot hear while the steps of the others go on (no step
ends without every rank), a controller that hears nobody, and ranks that load, save or evaluate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from homelab.shared.protocol.phases import BEFORE_TRAINING, FIRST_STEP_FACTOR
from homelab.shared.protocol.phases import LIMITS_S as PHASE_LIMITS_S
from homelab.shared.protocol.rank_messages import DEAD, RankStatus
from homelab.shared.protocol.run_messages import StatusLine

STOPPED = frozenset("Tt")
Kind = Literal["well", "done", "stopped", "superseded", "exit", "dead-rank", "frozen-rank", "silent-node", "hang"]
TROUBLE: frozenset[Kind] = frozenset({"exit", "dead-rank", "frozen-rank", "silent-node", "hang"})

# A line comes every second at least; five missed ones are no scheduling delay.
UNHEARD_S = 5.0
# Whom ranks that give no sign may wait for. "whole": everybody is heard, so only for somebody who has come to a standstill, or who works
# slowly (a machine at a tenth of its speed takes ten times its step, and gives a sign after each pass of it). "unheard": a node that we do
# not hear; it may be that slow, too. "cut": a node that others cannot reach any more, which is no matter of speed.
Company = Literal["whole", "unheard", "cut"]
# In a step, longer than the least and so many times the usual step is too long.
LEAST_STILL_S: Mapping[Company, float] = {"whole": 30.0, "unheard": 5.0, "cut": 5.0}
STILL_FACTOR: Mapping[Company, float] = {"whole": 12.0, "unheard": 12.0, "cut": 3.0}
# A process that is stopped by a signal for so long is not being looked at by a debugger for a moment.
FROZEN_S = 3.0
# Before the second step no step time is measured (kernels are compiled, caches are cold). Where the plan expects long steps: so
# many of those, because what it expects of a card that was never measured may be wrong.
FIRST_STEP_S: Mapping[Company, float] = {"whole": 300.0, "unheard": 120.0, "cut": 30.0}
# Without a sign, which is also that the process is seen to work (`homelab.node.system.process_activity`). While a node is missing, waiting so long for it is
# the likelier cause than the work itself.
LIMITS_S: Mapping[Company, Mapping[str, float]] = {
    "whole": {**PHASE_LIMITS_S, "absent": 300.0, "starting": 300.0, "fetching": 300.0},
    "unheard": {
        "absent": 120.0,
        "starting": 120.0,
        "loading": 120.0,
        "connecting": 120.0,
        "fetching": 120.0,
        "saving": 240.0,
        "evaluating": 600.0,
    },
    "cut": {"absent": 30.0, "starting": 30.0, "loading": 30.0, "connecting": 30.0, "fetching": 30.0, "saving": 60.0, "evaluating": 180.0},
}
# A node is gone when it is not heard and no heard node has reached it for this long, whatever the ranks do.
MISSING_S = 4.0
# Who writes a checkpoint is seen to work, at the latest after so long: a disk may stall.
WRITING_S = 10.0
# Ranks that load may stand still for minutes: before the first step a node counts as missing only after so long.
LOST_S = 20.0


@dataclass(frozen=True)
class AttemptVerdict:
    """What is the matter.

    `nodes` and `ranks` are who is blamed, `because` says why in words, `blind` are nodes that only we do not hear.
    """

    kind: Kind
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    because: str = ""
    blind: tuple[str, ...] = ()

    @property
    def is_trouble(self) -> bool:
        """Something has to be done."""
        return self.kind in TROUBLE


def judge(
    attempt: int, expected: Collection[str], signs: Mapping[str, NodeStatus], step_s: float | None, planned_s: float | None = None
) -> AttemptVerdict:
    """The verdict on one attempt.

    `expected`: the nodes of its plan. `signs`: each node's last line (none for a node that never spoke). `step_s`: how long the
    slowest of the last steps took (p99), None before the second step of this attempt; `planned_s`: how long the plan expects one to take.
    """
    fresh = {name: sign for name, sign in signs.items() if name in expected and sign.heard_s <= UNHEARD_S}
    unheard = tuple(name for name in expected if name not in fresh)
    statuses = {name: sign for name, sign in signs.items() if name in expected}
    if any(sign.newest > attempt for sign in statuses.values()):
        return AttemptVerdict("superseded", because="a node knows a newer attempt: another controller has recovered this run")
    ended = _ended(statuses, expected, fresh)
    if ended is not None:
        return ended
    for detect in (_failed, _dead, _frozen):
        verdict = detect(fresh)
        if verdict is not None:
            return verdict
    silent_node = _gone(fresh, unheard)
    if silent_node is not None:
        return silent_node
    lost = tuple(name for name in unheard if name not in statuses or statuses[name].heard_s > LOST_S)
    return _still(fresh, unheard, lost, step_s, planned_s)


def confirmed(first: AttemptVerdict, again: AttemptVerdict, signs: Mapping[str, NodeStatus]) -> AttemptVerdict:
    """What holds of an end that was seen: `first`, or `again`, judged when torchrun has had the time to say its own word (`signs`).

    A run that is done is not started again, whatever was seen in between. Of what is trouble the first word tells most.
    """
    ended_well = all(name in signs and _is_done(signs[name]) for name in first.nodes)
    return first if again.is_trouble or (again.kind == "well" and not ended_well) else again


def _ended(statuses: Mapping[str, NodeStatus], expected: Collection[str], fresh: Mapping[str, NodeStatus]) -> AttemptVerdict | None:
    # From another controller, too: the ranks die next, one after another.
    if any(sign.stopping or (sign.exit is not None and sign.exit.stopped) for sign in statuses.values()):
        return AttemptVerdict("stopped", because="it was stopped by hand")
    done_nodes = {name for name, sign in statuses.items() if _is_done(sign)}
    # The ranks leave together: who ended well has seen all others end. A node that is not heard any more changes nothing.
    if done_nodes and all(name in done_nodes or name not in fresh for name in expected):
        return AttemptVerdict("done")
    return None


def _is_done(sign: NodeStatus) -> bool:
    """Whether the node ended well. After a kill of the agent, when no process waited for torchrun, every rank must have reported "done"."""
    if sign.exit is not None:
        return sign.exit.is_success
    has_vanished = sign.started and sign.agent in DEAD and sign.torchrun in DEAD
    return has_vanished and bool(sign.ranks) and all(rank.phase == "done" for rank in sign.ranks.values())


def _is_unfinished(sign: NodeStatus) -> bool:
    """Between torchrun's own end and the agent's word of it there is a moment: only a rank that was not done tells more."""
    if sign.agent in DEAD:
        return not _is_done(sign)
    return any(rank.has_begun and rank.phase != "done" for rank in sign.ranks.values())


def _failed(fresh: Mapping[str, NodeStatus]) -> AttemptVerdict | None:
    bad = {name: sign.exit for name, sign in fresh.items() if sign.exit is not None and not sign.exit.is_success}
    if not bad:
        return None
    return AttemptVerdict("exit", tuple(bad), because="; ".join(f"torchrun on {name} ended with {exit}" for name, exit in bad.items()))


def _dead(fresh: Mapping[str, NodeStatus]) -> AttemptVerdict | None:
    dead = [(name, number) for name, number, rank in _ranks(fresh) if rank.is_dead and fresh[name].exit is None]
    if dead:
        names = ", ".join(f"rank {number} on {name}" for name, number in dead)
        return AttemptVerdict(
            "dead-rank", tuple(dict.fromkeys(name for name, _ in dead)), tuple(rank for _, rank in dead), f"the process of {names} is gone"
        )
    vanished = tuple(
        name for name, sign in fresh.items() if sign.started and sign.exit is None and sign.torchrun in DEAD and _is_unfinished(sign)
    )
    if vanished:
        return AttemptVerdict("exit", vanished, because=f"torchrun on {', '.join(vanished)} is gone, and no record of its end was written")
    return None


def _frozen(fresh: Mapping[str, NodeStatus]) -> AttemptVerdict | None:
    frozen = [(name, number) for name, number, rank in _ranks(fresh) if rank.state in STOPPED and rank.still_s >= FROZEN_S]
    if not frozen:
        return None
    names = ", ".join(f"rank {number} on {name}" for name, number in frozen)
    return AttemptVerdict(
        "frozen-rank",
        tuple(dict.fromkeys(name for name, _ in frozen)),
        tuple(rank for _, rank in frozen),
        f"{names} was stopped by a signal",
    )


def _gone(fresh: Mapping[str, NodeStatus], unheard: tuple[str, ...]) -> AttemptVerdict | None:
    # The next attempt may begin with the checkpoint that is being written; a rank that only waits for the lost node in its save writes none.
    if any(rank.phase == "saving" and rank.still_s < WRITING_S for _, _, rank in _ranks(fresh)):
        return None
    missed = {name: {other: sign.missing_s[name] for other, sign in fresh.items() if name in sign.missing_s} for name in unheard}
    silent = {name: because for name, because in missed.items() if because and min(because.values()) >= MISSING_S}
    if not silent:
        return None
    because = "; ".join(f"nothing is heard of {name}, and {', '.join(by)} cannot reach it any more" for name, by in silent.items())
    return AttemptVerdict("silent-node", tuple(silent), because=because)


def _still(
    fresh: Mapping[str, NodeStatus], unheard: tuple[str, ...], lost: tuple[str, ...], step_s: float | None, planned_s: float | None
) -> AttemptVerdict:
    """A rank has to make progress. A rank that is heard and does proves that the ranks that are not heard do, too."""
    if not fresh:
        return AttemptVerdict("well", because="no node can be heard: is this machine cut off?", blind=unheard)
    is_cut = any(missed_s >= MISSING_S for sign in fresh.values() for missed_s in sign.missing_s.values())
    later: Company = "cut" if is_cut else "unheard" if unheard else "whole"
    before: Company = later if lost else "whole"  # while ranks load, a node that is not heard for a moment is none that is missing
    late = [
        (name, number, rank)
        for name, number, rank in _ranks(fresh)
        if rank.phase != "done"
        and rank.still_s > limit_s(rank.phase, step_s, before if rank.phase in BEFORE_TRAINING else later, planned_s)
    ]
    waiting = [rank for _, _, rank in _ranks(fresh) if rank.phase != "done"]
    if not late or len(late) < len(waiting):
        # A rank that computes, saves or loads while the others wait for it: its own limit counts, and theirs has to wait.
        return AttemptVerdict("well", because=f"nothing is heard of {', '.join(unheard)}" if unheard else "", blind=unheard)
    longest_s = max(rank.still_s for _, _, rank in late)
    if unheard:
        return AttemptVerdict(
            "silent-node",
            unheard,
            because=f"nothing is heard of {', '.join(unheard)}, and all others have stood still for {longest_s:.0f} s",
        )
    behind = min(rank.step for _, _, rank in late)
    ranks = tuple(number for _, number, rank in late if rank.step == behind)
    at = sorted({f"{rank.phase} at step {rank.step}" for _, _, rank in late})
    return AttemptVerdict(
        "hang", (), ranks if len(ranks) < len(late) else (), f"all ranks have stood still for {longest_s:.0f} s ({', '.join(at)})"
    )


def limit_s(phase: str, step_s: float | None, company: Company, planned_s: float | None = None) -> float:
    """How long a rank in this phase may give no sign. `step_s`: the usual step, None before it is measured; `planned_s`: the plan's."""
    if phase != "training":
        return LIMITS_S[company].get(phase, FIRST_STEP_S[company])
    if step_s is None:
        return max(FIRST_STEP_S[company], FIRST_STEP_FACTOR * (planned_s or 0.0))
    return max(LEAST_STILL_S[company], STILL_FACTOR[company] * step_s)


def _ranks(signs: Mapping[str, NodeStatus]) -> Iterator[tuple[str, int, RankStatus]]:
    for name, sign in signs.items():
        for number, rank in sign.ranks.items():
            yield name, number, rank


class NodeStatus(StatusLine):
    """One node. `heard_s` is how long ago the line came, by the controller's monotonic clock (set there)."""

    heard_s: float = 0.0


def common_checkpoint(statuses: Mapping[str, NodeStatus]) -> int:
    """The step of the newest checkpoint that all nodes hold; 0 where one holds none."""
    return min((status.checkpoint for status in statuses.values()), default=0)
