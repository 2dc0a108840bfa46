"""What to do about trouble: go on, without whom, or give up and say why. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from homelab.controller.attempt.watchdog import AttemptVerdict
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.run.restart import Restart
from homelab.shared.law.checkpoint_interval import FIRST_STEP
from homelab.shared.recipe import Checkpoint, LogPolicy, Recovery

WINDOW_S = 3600.0
# The same end at the same place: trying again has not helped, and will not.
SAME_PLACE = 3
# Trying again there would end the same way; on the other nodes it would not.
OF_ONE_NODE = frozenset(
    {
        "disk-full", "disk-quota", "disk-failing", "read-only", "file-too-large", "shared-memory", "locked-memory", "open-files",
        "no-kernel-image", "cuda-driver", "driver-too-old", "driver-half-updated", "fabric-manager", "cuda-stub", "gpu-after-suspend", "no-gpu-visible",
        "cuda-libraries", "system-libraries", "cpu-too-old", "illegal-instruction", "no-compiler",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """How an attempt failed. `met`: the recipe's own policies that the logs of a node meet."""

    verdict: AttemptVerdict
    diagnosis: Diagnosis | None = None
    met: Sequence[tuple[str, LogPolicy]] = ()


@dataclass(frozen=True)
class Decision:
    """`go-on`: the next attempt, without `exclude`; `give-up`: not. `cause` and `node` are what is remembered of it."""

    kind: Literal["go-on", "give-up"]
    because: str
    cause: str
    node: str = ""
    exclude: tuple[str, ...] = ()
    hint: str = ""


def decide(failure: Failure, restarts: Sequence[Restart], recovery: Recovery, *, now: float, step: int, nodes: Collection[str]) -> Decision:
    """`step`: from which the next attempt would go on; `now`: seconds since 1970.

    `nodes`: that answer, to go on with. One that was silent and answers again while too few others do is as good as any.
    """
    verdict, diagnosis = failure.verdict, failure.diagnosis
    cause, title, hint = (diagnosis.cause, diagnosis.title, diagnosis.hint) if diagnosis else (verdict.kind, verdict.because, "")
    node = diagnosis.first_node if diagnosis else ", ".join(verdict.nodes)

    def give_up(because: str) -> Decision:
        return Decision("give-up", because, cause, node, hint=hint)

    excluded = []
    for name, policy in failure.met:
        if policy.action == "stop":
            return give_up(f'{title}; {name} printed the words of [recovery] log_policies: "{policy.pattern}"')
        excluded.append(name)
    if not recovery.auto:
        return give_up(f"{title}; [recovery] auto is off")
    if cause in OF_ONE_NODE and len(set(nodes) - {node, *excluded}) >= recovery.min_nodes:
        excluded.append(node)
    elif diagnosis is not None and not diagnosis.retryable:
        return give_up(f"{title}; trying again would end the same way")
    staying = set(nodes) - set(excluded)
    if excluded and len(staying) < min(recovery.min_nodes, len(nodes)):  # where too few answer, they are waited for
        left = f"{len(staying)} of [recovery] min_nodes = {recovery.min_nodes}" if staying else "no node"
        return give_up(f"{title}; without {', '.join(dict.fromkeys(excluded))} there would be {left} left")
    # A time in the future is from before the clock was set back; its age is unknown.
    lately = [restart for restart in restarts if 0 <= now - restart.at < WINDOW_S]
    if len(lately) >= recovery.max_restarts:
        return give_up(f"{title}; {len(lately)} restarts within the last hour, and [recovery] max_restarts = {recovery.max_restarts}")
    same = [restart for restart in restarts if (restart.cause, restart.node, restart.resume_step) == (cause, node, step)]
    if len(same) >= SAME_PLACE:
        return give_up(f"{title}; it ended like this {len(same)} times before, without a new checkpoint")
    return Decision("go-on", title, cause, node, tuple(dict.fromkeys(excluded)))


def keeping(indispensable: Mapping[str, tuple[int, ...]], decision: Decision) -> Decision:
    """The decision, but no node is left out that is the only node with shards of the checkpoint: without them nobody can go on.

    `indispensable`: node -> those shards.
    """
    needed = [name for name in decision.exclude if name in indispensable]
    if decision.kind == "give-up" or not needed:
        return decision
    whose = "; ".join(f"{name} is the only node with shard {', '.join(map(str, indispensable[name]))} of the checkpoint" for name in needed)
    return replace(decision, kind="give-up", because=f"{decision.because}; {whose}, and cannot be left out", exclude=())


def may_begin_again(step: int, checkpoint: Checkpoint) -> bool:
    """Where no checkpoint is found, and `step` is the last that anybody did: whether to begin at step 0.

    It loses nothing while none was due. Nobody goes beyond the first step that is saved before all nodes hold it: where somebody
    did, a node that is silent now has it; where nobody did, the fault came while it was written.
    """
    return step <= (checkpoint.every_steps or FIRST_STEP)


def rejoining(
    well: Collection[str], first_seen: Mapping[str, int], checkpoint: int, verdict: AttemptVerdict
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Which of the nodes that are `well` again are taken back now; and for each the newest checkpoint when it was first seen to be well.

    `checkpoint`: the newest that all nodes hold. Right after a checkpoint next to nothing is lost by a restart. Not while a node cannot be
    heard: it could not be stopped.
    """
    since = {name: first_seen.get(name, checkpoint) for name in well}
    back = () if verdict.blind else tuple(sorted(name for name, before in since.items() if checkpoint > before))
    return back, since
