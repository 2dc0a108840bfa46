"""Give a node back to its owner, or take it back: written down where the supervisors of the runs that use it look, then waited for."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homelab.controller.attempt import remote_supervisor
from homelab.controller.base.errors import HomelabError, InputError, did_you_mean
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.base.units import listed
from homelab.controller.features.queue import hours
from homelab.controller.planning.types import Plan
from homelab.controller.remote import agent_errors, ship
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import event_log, house, leave, leave_folder, ownership, run_folder, store, supervisor_lock, supervisor_record
from homelab.controller.run.leave import Leave
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.state import FINISHED

# A save is waited for two minutes at most (`homelab.controller.features.supervise.leaving`), then the ranks are ended.
FREE_S = 180.0
_LOOK_S = 0.2
_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 24 * 3600.0}


@dataclass(frozen=True)
class Left:
    """What came of it. `lasting`: the leave, None where the node was taken back. `goes_on`: run -> the nodes that go on with it; none: it waits.

    `elsewhere`: run -> the node on which its supervisor is, which does the rest. `overridden`: why the node would be its owner's, in words: that does
    not count until it is over once.
    """

    node: str
    lasting: Leave | None
    goes_on: dict[str, tuple[str, ...]]
    elsewhere: dict[str, str]
    overridden: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The `--json` shape; `until` in seconds since 1970, null without an end."""
        return {
            "node": self.node, "given_back": self.lasting is not None, "until": self.lasting.until if self.lasting else None,
            "runs": {run: list(nodes) for run, nodes in self.goes_on.items()}, "supervised_on": self.elsewhere, "overridden": list(self.overridden),
        }  # fmt: skip


def duration_s(text: str) -> float:
    """Of `--for`: "2h", "90min", "1h30m". Raises InputError."""
    found = re.findall(r"(\d+(?:\.\d+)?)\s*(min|[smhd])", text.strip().lower(), re.ASCII)
    is_whole = "".join(number + unit for number, unit in found) == re.sub(r"\s", "", text.lower())
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in found)
    if not is_whole or not 0 < seconds <= leave.MOST_S:
        raise InputError(
            f'"{text}" is no duration', where=f"--for {text}", hint="write hours and minutes: --for 2h, --for 90min, --for 1h30min"
        )
    return seconds


def wish(node: str, for_text: str, until_text: str, now: float) -> Leave:
    """What was typed. Raises InputError."""
    if for_text and until_text:
        raise InputError(
            "a leave ends once, and two ends are named", where=f"--for {for_text} --until {until_text}", hint="leave one of them out"
        )
    if for_text:
        seconds = duration_s(for_text)
        return Leave(node=node, since=now, until=now + seconds, for_s=seconds)
    # 23:00 typed at 23:00:30 is that of tomorrow.
    return Leave(node=node, since=now, until=hours.following(hours.parsed(until_text, "--until"), now + 60.0) if until_text else None)


def refuse_unknown(node: str, names: Sequence[str], cluster_file: Path) -> None:
    """Raises InputError for a node that the cluster does not have."""
    if node not in names:
        raise InputError(
            f'no node is called "{node}".{did_you_mean(node, names)}', where=f"{cluster_file} has {', '.join(names)}",
            hint=homelab("yield", names[0]),
        )  # fmt: skip


def give_back(fleet: Fleet, runs_dir: Path, one: Leave, say: Say) -> Left:
    """Keep the wish, and wait until nothing of a run is on the node. Raises HomelabError where a run has nobody who could end it there, and where
    a run of another folder is on it: nobody would read the wish.
    """
    _refuse_foreign(fleet, runs_dir, one.node)
    runs = _open_runs(runs_dir)
    before, now = leave_folder.lasting(runs_dir).get(one.node), time.time()
    one = one.model_copy(update={"since": before.since}) if before is not None and before.since <= now else one
    leave_folder.write(runs_dir, one)
    elsewhere = _told_elsewhere(fleet, runs, one)
    using = _at_work(fleet, [paths for paths in runs if _uses(paths, one.node) and paths.name not in elsewhere], one.node)
    for paths in using:
        _refuse_unsupervised(paths, one)
    goes_on = {}
    for paths in using:
        team = _free(paths, one, say)
        if supervisor_lock.is_held(paths):  # else it has ended meanwhile
            goes_on[paths.name] = team
    return Left(one.node, one, goes_on, elsewhere)


def take_back(fleet: Fleet, runs_dir: Path, node: str) -> Left:
    """The runs may use it again, whatever the node itself says of its owner now. Raises InputError where nobody has it."""
    before, runs = leave_folder.lasting(runs_dir).get(node), _open_runs(runs_dir)
    # What was on the card before a run is known of that run: without it the node tells of no stranger there.
    asked = (house.seen(fleet, [node], run).get(node, {}) for run in (None, *(paths.name for paths in runs)))
    signs = {key: one for its in asked for key, one in its.items()}
    went_by_itself = any(node in leave.lasting(event_log.lines(paths)) for paths in runs)
    if before is None and not signs and not went_by_itself:
        raise InputError(f"{node} is with nobody: there is nothing to take back", where=f"node {node}", hint=homelab("status"))
    one = (before or Leave(node=node, since=time.time())).model_copy(update={"is_back": True, "against": tuple(signs)})
    leave_folder.write(runs_dir, one)
    here = [paths.name for paths in runs if supervisor_lock.is_held(paths) and node in leave.lent(event_log.lines(paths))]
    words = tuple(one.because for one in signs.values())
    return Left(node, None, dict.fromkeys(here, ()), _told_elsewhere(fleet, runs, one), words)


def _open_runs(runs_dir: Path) -> list[RunPaths]:
    return [paths for paths in store.runs_in(runs_dir) if supervisor_lock.is_held(paths) or run_folder.state_of(paths) not in FINISHED]


def _plan(paths: RunPaths) -> Plan | None:
    try:
        return run_folder.plan_of(paths)
    except HomelabError:  # it is being launched: its supervisor reads the wish when it starts
        return None


def _uses(paths: RunPaths, node: str) -> bool:
    plan = _plan(paths)
    return plan is not None and node in {other.name for other in plan.nodes}


def _at_work(fleet: Fleet, runs: Sequence[RunPaths], node: str) -> list[RunPaths]:
    """Without those that nobody looks after and of which nothing is on the node: they were left unfinished, and use nothing."""
    left = [
        paths
        for paths in runs
        if not supervisor_lock.is_held(paths) and not supervisor_record.is_under_way(store.read_object(paths.supervisor_json))
    ]
    answer = fleet.ask("runs", names=[node])[0].get(node) if left else None
    known = {entry["name"]: entry["alive"] or entry["busy"] for entry in answer["runs"]} if answer else {}
    return [paths for paths in runs if paths not in left or answer is None or known.get(paths.name)]


def _told_elsewhere(fleet: Fleet, runs: Sequence[RunPaths], one: Leave) -> dict[str, str]:
    """Run -> the node that has its supervisor, which was sent the wish."""
    told = {}
    for paths in runs:
        if not supervisor_lock.is_held(paths) and (active := remote_supervisor.at_work(fleet, paths)):
            place = remote_supervisor.SupervisorPlace(active[0], paths.name)
            file = {f"runs/{leave_folder.NAME}/{one.node}.json": one.model_dump_json().encode()}
            fleet.agent(place.node).send("supervisor-put", place.request(fleet), ship.tar(file, mode=0o600))
            told[paths.name] = place.node
    return told


def _refuse_foreign(fleet: Fleet, runs_dir: Path, node: str) -> None:
    """Raises HomelabError where the node says that a run trains on it which this folder does not know. One that is silent is taken at its word: it is free."""
    answer = fleet.ask("runs", names=[node])[0].get(node)
    known = {paths.name for paths in store.runs_in(runs_dir)}
    entries = answer["runs"] if answer else ()
    found = next((entry["name"] for entry in entries if (entry["alive"] or entry["busy"]) and entry["name"] not in known), None)
    if found is not None:
        raise HomelabError(
            f"{found} is at work on {node}, and {runs_dir} does not know this run", where=f"node {node}",
            hint=Hint(
                "type it in the folder of that run, or name its runs: {}; or at the machine itself: {}",
                homelab("yield", node, "--runs-dir", "DIR"), agent_errors.on_workdir(fleet.agent(node).node, "touch", "/yield"),
            ),
        )  # fmt: skip


def _refuse_unsupervised(paths: RunPaths, one: Leave) -> None:
    """Raises HomelabError where nobody looks after the run. A supervisor that may be on its way, after a launch, is waited for, but not for ever:
    that launch may be stopped.
    """
    began_s = time.monotonic()
    while not supervisor_lock.is_held(paths):
        record, waited_s = store.read_object(paths.supervisor_json), time.monotonic() - began_s
        most_s = FREE_S if supervisor_record.is_under_way(record) else ownership.STILL_S
        if record.get("wanted") is False or waited_s > most_s:
            break
        if run_folder.state_of(paths) in FINISHED:
            return
        time.sleep(_LOOK_S)
    else:
        return
    plan = _plan(paths)
    others = ",".join(node.name for node in plan.nodes if node.name != one.node) if plan else ""
    by_hand = Hint("or by hand: {}", homelab("stop", paths.name))
    by_hand = Hint("{}, then {}", by_hand, homelab("recover", paths.name, "--nodes", others)) if others else by_hand
    raise HomelabError(
        f"{paths.name} has no supervisor here that could leave {one.node}; no later run takes the node", where=f"{paths.name}, node {one.node}",
        hint=Hint("start one, which leaves the node at once: {}; {}", homelab("supervise", paths.name), by_hand),
    )  # fmt: skip


def _free(paths: RunPaths, one: Leave, say: Say) -> tuple[str, ...]:
    """Wait until the node is free; the nodes that go on with the run. Raises HomelabError where it is not free for long."""
    say(f"{paths.name} saves a checkpoint and leaves {one.node}")
    _wait_until(lambda: one.node in leave.lasting(event_log.lines(paths)), paths, one)
    say(f"{one.node} is free; {paths.name} plans anew")
    return _next_team(paths, one.node)


def _next_team(paths: RunPaths, node: str) -> tuple[str, ...]:
    """The nodes of the next attempt; empty where it does not come soon: the run waits."""
    deadline = time.monotonic() + FREE_S
    while supervisor_lock.is_held(paths) and time.monotonic() < deadline:
        plan = _plan(paths)
        if plan is not None and node not in (names := tuple(other.name for other in plan.nodes)):
            return names
        if leave.is_waiting(event_log.lines(paths)):
            return ()
        time.sleep(_LOOK_S)
    return ()


def _wait_until(is_free: Callable[[], bool], paths: RunPaths, one: Leave) -> None:
    deadline = time.monotonic() + FREE_S
    while not is_free():
        if not supervisor_lock.is_held(paths) and run_folder.state_of(paths) in FINISHED:
            return  # the run ended meanwhile
        if time.monotonic() > deadline:
            raise HomelabError(
                f"{one.node} is not free yet, after {FREE_S:.0f} s; its supervisor goes on with it", where=f"{paths.name}, node {one.node}",
                hint=Hint("look: {}; to end it at once: {}", homelab("status", paths.name), homelab("stop", paths.name)),
            )  # fmt: skip
        time.sleep(_LOOK_S)


def lines(left: Left, now: float) -> list[str]:
    """The answer for people; its first line says whether the node is free."""
    if left.lasting is None:
        back = listed([*left.goes_on, *left.elsewhere])
        return [
            f"{left.node} was taken back"
            + (f": {back} saves, and goes on with it as soon as it is healthy" if back else "; no run waits for it"),
            *([f"this counts no more until it is over once: {'; '.join(left.overridden)}"] if left.overridden else []),
        ]
    until = left.lasting.until_words(now)
    said = [f"{left.node} is free{f' until {until}' if until else ''}" + ("" if left.goes_on or left.elsewhere else "; no run uses it")]
    if left.elsewhere:
        said = [f"{left.node} is given back{f' until {until}' if until else ''}"]
    for run, nodes in left.goes_on.items():
        said.append(f"{run} goes on on {listed(nodes)}" if nodes else f"{run} is saved, and waits for {left.node}")
    said += [f"the supervisor of {run} on {place} saves it and leaves {left.node}" for run, place in left.elsewhere.items()]
    return said
