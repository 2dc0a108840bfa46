"""What the ranks printed, gathered from their nodes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

from homelab.controller.attempt import run_owner
from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import homelab
from homelab.controller.planning.types import Plan
from homelab.controller.remote import poll_reply
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import node_matching, ownership, run_folder, store
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.state import State, newest_attempt, run_state
from homelab.shared.protocol.run_messages import Reply


@dataclass(frozen=True)
class RankLog:
    """The last lines that a rank printed, and its node."""

    node: str
    stdout: list[str]
    stderr: list[str]


@dataclass(frozen=True)
class RunLogs:
    """The last lines of an attempt: of its ranks, by number, and of torchrun, by node. `unreachable`: node -> why it was not asked.

    `is_final`: nothing more will come.
    """

    run: str
    attempt: int
    newest_attempt: int
    ranks: dict[int, RankLog]
    torchrun: dict[str, list[str]]
    unreachable: dict[str, str]
    is_final: bool

    def as_dict(self) -> dict[str, Any]:
        """The `--json` shape."""
        return {key: value for key, value in asdict(self).items() if key != "is_final"}


def read(fleet: Fleet, paths: RunPaths, rank: int | None, lines: int, attempt: int | None = None) -> RunLogs:
    """The last `lines` of each stream of an attempt (default: the newest). Raises InputError for a rank or an attempt that is not there."""
    newest = run_folder.plan_of(paths).attempt
    if attempt is not None and attempt > newest:  # another controller, or a supervisor on a node, may have recovered the run
        newest = read(fleet, paths, None, 1).attempt
    if attempt is not None and not 1 <= attempt <= newest:
        raise InputError(f"there is no attempt {attempt}", where=f"{paths.name}: attempts 1 to {newest}", hint=homelab("logs", paths.name))
    number = attempt or newest
    plan = _plan(paths, number, newest)
    if plan is not None and rank is not None and rank not in [entry.rank for entry in plan.ranks]:
        raise InputError(
            f"there is no rank {rank}",
            where=f"{paths.name}, attempt {number}: ranks 0 to {plan.world_size - 1}",
            hint=homelab("logs", paths.name, "--rank", "0", *([] if attempt is None else ["--attempt", str(attempt)])),
        )
    chosen = [entry for entry in plan.ranks if rank is None or entry.rank == rank] if plan else []
    names = sorted({entry.node for entry in chosen} if plan else {node.name for node in fleet.cluster.nodes})
    request = node_matching.poll_request(
        paths.name,
        tail_lines=lines,
        torchrun_lines=lines,
        attempt=attempt,
        known_lines={entry.rank: node_matching.ALL_LINES for entry in chosen},
    )
    answers, unreachable, _ = node_matching.poll(fleet, request, names)
    replies = poll_reply.parse_replies(answers)
    if attempt is None and newest_attempt(replies) > number and run_folder.refresh(fleet, paths, replies).attempt > number:
        return read(fleet, paths, rank, lines)
    # A node that has not heard of this attempt yet speaks of the one before.
    runs = {name: reply.run for name, reply in replies.items() if reply.run and reply.run.attempt == number}
    current = {name: reply if name in runs else reply.replace(run=None) for name, reply in replies.items()}
    return RunLogs(
        paths.name, number, newest, _rank_logs(current, rank), {name: list(run.torchrun_tail) for name, run in runs.items()}, unreachable,
        is_final=number < newest or _is_over(paths, number, names, current, unreachable),
    )  # fmt: skip


def _is_over(paths: RunPaths, attempt: int, names: list[str], replies: dict[str, Reply], unreachable: dict[str, str]) -> bool:
    """Whether nothing more will be printed: the attempt has ended, and nobody is about to start the next."""
    state = run_state(names, replies, unreachable, kept=cast("State | None", store.state_of(paths, attempt)))
    on_nodes = {name: reply.supervisor for name, reply in replies.items() if reply.supervisor}
    return state != "lost" and ownership.is_over(state, run_owner.of_run(paths, attempt, replies, on_nodes), float("inf"))


def _plan(paths: RunPaths, number: int, newest: int) -> Plan | None:
    """The plan of the attempt; None where that of an older one is damaged: the nodes have theirs."""
    try:
        return run_folder.plan_of(paths, number if number < newest else None)
    except HomelabError:
        if number < newest:
            return None
        raise


def _rank_logs(replies: dict[str, Reply], rank: int | None) -> dict[int, RankLog]:
    return {
        number: RankLog(name, list(entry.log_tail.stdout), list(entry.log_tail.stderr))
        for name, reply in replies.items()
        if reply.run is not None
        for number, entry in reply.run.ranks.items()
        if rank is None or number == rank
    }


def new_lines(old: list[str], new: list[str]) -> list[str]:
    """The lines of `new` that come after the end of `old` (both are tails of one growing text)."""
    for overlap in range(min(len(old), len(new)), 0, -1):
        if old[-overlap:] == new[:overlap]:
            return new[overlap:]
    # The old tail may be whole inside of the new, longer one.
    for start in range(len(new) - len(old) + 1) if old else ():
        if new[start : start + len(old)] == old:
            return new[start + len(old) :]
    return new
