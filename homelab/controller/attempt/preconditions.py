"""Why a run cannot be recovered now: too few nodes, no checkpoint, or it goes on by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Mapping
from typing import Any

from homelab.controller.attempt.progress import ProgressTracker
from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.config.recipe import Recipe
from homelab.controller.facts.node_commands import RESTART_IN_WORDS
from homelab.controller.remote.fanout import Fleet
from homelab.controller.remote.poll_reply import parse_replies
from homelab.controller.run import node_matching
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.run_messages import Reply

_MOST_SHOWN = 6
_LOOK_S = 0.5


def refuse_too_few(paths: RunPaths, recipe: Recipe, names: Collection[str], reasons: Mapping[str, str]) -> None:
    """Raises HomelabError when fewer nodes are left than the recipe wants at least. `reasons`: node -> why it takes no part."""
    least, count = recipe.recovery.min_nodes, len(set(names))
    if count >= least:
        return
    left = f"{count} node{' is' if count == 1 else 's are'} left{' (' + ', '.join(names) + ')' if names else ''}"
    without = "; ".join(f"{name}: {why}" for name, why in reasons.items())
    raise HomelabError(
        f"{left}, and [recovery] min_nodes is {least}",
        where=f"{paths.run_json}, key recipe.recovery.min_nodes{f'; without {without}' if without else ''}",
        hint=Hint("bring a node back ({}), or lower that number in that file: the training stays the same", homelab("preflight")),
    )


def refuse_unnamed_shares(paths: RunPaths, described: Mapping[str, Any], node_names: Collection[str]) -> None:
    """Raises InputError when a node that [parallel] shares gives rows is not in cluster.toml any more: no plan could be made."""
    missing = [name for name in named_in_shares(described) if name not in node_names]
    if missing:
        raise InputError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in cluster.toml any more, and [parallel] shares of this run names "
            f"{'it' if len(missing) == 1 else 'them'}; the nodes are: {', '.join(node_names)}",
            where=f"{paths.run_json}, key recipe.parallel.shares",
            hint=Hint("{}, then: {}", ways_of_shares(paths, missing), homelab("recover", paths.name)),
        )


def named_in_shares(described: Mapping[str, Any]) -> list[str]:
    """The nodes that the run's recipe gives fixed shares; none where run.json is damaged."""
    recipe = described.get("recipe")
    parallel = recipe.get("parallel") if isinstance(recipe, dict) else None
    shares = parallel.get("shares") if isinstance(parallel, dict) else None
    return [str(name) for name in shares] if isinstance(shares, dict) else []


def ways_of_shares(paths: RunPaths, missing: Collection[str]) -> str:
    """What lets a run go on whose shares name nodes that are not in cluster.toml."""
    return (
        f"add {', '.join(missing)} to cluster.toml again, or give the machine its old name back there; or put its new name into "
        f"{paths.run_json}, key recipe.parallel.shares (the training stays the same)"
    )


def refuse_leftovers(stopped: dict[str, dict[str, Any]]) -> None:
    """Raises HomelabError when a process of the last attempt does not end. `stopped`: of the verb `stop`, by node."""
    for node, answer in stopped.items():
        if answer["left"]:
            raise HomelabError(
                f"processes of the last attempt did not end: {', '.join(map(str, answer['left']))}",
                where=f"node {node}",
                hint=f"on that node: {RESTART_IN_WORDS} (a process that SIGKILL does not end is stuck in the kernel); or leave it out with --nodes",
            )


def no_checkpoint(run: str, answers: Mapping[str, Mapping[str, Any]], silent: Mapping[str, str]) -> HomelabError:
    """The error where no node has a complete one: they are damaged, who may have them does not answer, or nothing was ever saved.

    `answers`: of the verb `checkpoints`, by node; `silent`: nodes that gave none, and why.
    """
    bad = [f"step {step} on {node}: {why}" for node, answer in answers.items() for step, why in answer["bad"].items()]
    problem = "no complete checkpoint is left on the nodes that answer" + (
        f" ({'; '.join(f'{name} did not: {why}' for name, why in silent.items())})" if silent else ""
    )
    if bad:
        problem += f"; none of the {len(bad)} that are there is complete"
    elif not silent and not any(answer.get("run_known", True) for answer in answers.values()):
        problem = "no node knows this run, so there is no complete checkpoint: it never started, or its folders there are gone"
    reasons = [*bad[:_MOST_SHOWN], *([f"and {len(bad) - _MOST_SHOWN} more"] if len(bad) > _MOST_SHOWN else [])]
    return HomelabError(
        problem,
        where="; ".join([run, *reasons]),
        hint=Hint(
            "{}to start again at step 0: {}", "fix these nodes, then recover; " if silent else "", homelab("recover", run, "--from-scratch")
        ),
    )


def no_whole_checkpoint(run: str, gaps: Collection[str], silent: Collection[str]) -> HomelabError:
    """The error where nodes have shards of checkpoints, and of none all are there: to begin again would throw away what is saved.

    `gaps`: one sentence for each checkpoint; `silent`: nodes that gave no answer.
    """
    return HomelabError(
        "no checkpoint has all its shards on the nodes that answer",
        where="; ".join([run, *list(gaps)[:_MOST_SHOWN]]),
        hint=Hint(
            "{}; to start again at step 0: {}", f"bring {', '.join(silent)} back, then recover" if silent else "the other shards were on a node that lost its disk",
            homelab("recover", run, "--from-scratch"),
        ),
    )  # fmt: skip


def refuse_moving(
    fleet: Fleet, run: str, replies: Mapping[str, Reply], unreachable: Mapping[str, str], say: Say, planned_s: float | None = None
) -> None:
    """Raises InputError when the ranks that can be seen go on, though not every node answers: no step ends without all of them.

    Waits until that is clear: as long as a rank may stand still while it is well (`homelab.controller.attempt.watchdog`). `planned_s`: how long the plan
    expects a step to take.
    """
    runs = [reply.run for reply in replies.values() if reply.run]
    seconds = [metric.step_s for part in runs for rank in part.ranks.values() for metric in rank.metrics if metric.step_s]
    all_lines = {number: node_matching.ALL_LINES for part in runs for number in part.ranks}
    watch = ProgressTracker(statistics.median(seconds) if seconds else None, planned_s)
    names, is_announced = [reply.node for reply in replies.values()], False
    while True:
        answers, _ = fleet.ask("poll", node_matching.poll_request(run, known_lines=all_lines), names=names, timeout_s=15.0)
        watch.see(parse_replies(answers).values(), time.monotonic())
        if watch.moves:
            silent = "; ".join(f"{name}: {why}" for name, why in unreachable.items())
            raise InputError(
                "this run is still training, although some nodes do not answer: there is nothing to recover",
                where=f"{run}, step {watch.step}; {silent}",
                hint=Hint(
                    "to see why a node does not answer: {}; or stop the run first: {}",
                    homelab("preflight --only ssh"),
                    homelab("stop", run),
                ),
            )
        if watch.wait_s <= 0:
            return
        if not is_announced:
            is_announced = True
            say(f"{', '.join(unreachable)} cannot be asked: checking for up to {watch.wait_s:.0f} s whether the other ranks still train")
        time.sleep(min(_LOOK_S, watch.wait_s))
