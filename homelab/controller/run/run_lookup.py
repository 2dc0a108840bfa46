"""Which run a command means: one in this controller's folder, or one that only the nodes know, where the truth is."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import adoption, event_log, run_folder, run_names, store, supervisor_record
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.state import FINISHED
from homelab.shared.protocol import layout, lock

_BEGUN_S = 1.0  # a launch makes the run's folder, and says in the next instant that it is at work
_AGAIN_S = 0.3


class LaunchingError(HomelabError):
    """The run is being launched on this machine, and nothing of it is on its nodes yet."""


def awaited(fleet: Fleet, runs_dir: Path, name: str | None, say: Say) -> RunPaths:
    """`run`, but a run that is being launched is waited for. Raises HomelabError, too, if its launch ends without a start."""
    waited_for = None
    while True:
        try:
            return run(fleet, runs_dir, name, say)
        except LaunchingError as error:
            if waited_for is None:
                say(f"{error.message}: {error.where}")
            waited_for = error
            time.sleep(_AGAIN_S)
        except InputError as error:
            if waited_for is None:
                raise
            where = f"{waited_for.where}; it is gone"
            raise HomelabError("the launch has ended, and nothing was started", where=where, hint=homelab("launch RECIPE")) from error


def run(fleet: Fleet, runs_dir: Path, name: str | None, say: Say) -> RunPaths:
    """The run meant: by name, or the one that lives, or the newest. One that only the nodes know is adopted into `runs_dir`.

    Without a name the nodes are asked which lives, unless the newest of this folder is the only one in it that has not ended. A damaged
    folder is repaired from the nodes. Raises InputError when nobody knows it, UnreachableError when no node could be asked either,
    LaunchingError when it is being launched, HomelabError when its folder is damaged and no node that answers has it.
    """
    chosen = _choose(fleet, runs_dir, name, say)
    _refuse_launching(chosen)
    run_folder.repair(fleet, chosen, say)
    fleet.train_with(run_folder.description_of(chosen).recipe)
    return chosen


def _choose(fleet: Fleet, runs_dir: Path, name: str | None, say: Say) -> RunPaths:
    local = store.runs_in(runs_dir)
    open_here = [paths.name for paths in local if run_folder.state_of(paths) not in FINISHED or lock.is_held(paths.supervisor_lock)]
    newest = max(local, key=run_folder.created_at, default=None)
    if name is None and newest and open_here == [newest.name]:
        return newest
    if name is not None:
        chosen = run_names.choose(name, [paths.name for paths in local])
        if chosen and (chosen == name or not run_names.is_whole(name)):
            return RunPaths(runs_dir / chosen)
        if layout.is_usable(name):
            _refuse_unreadable(RunPaths(runs_dir / name))
            _refuse_launching(RunPaths(runs_dir / name))
    say("reading the runs of the nodes")
    answers, unreachable = fleet.ask("runs")
    event_log.tell_secrets_removed(runs_dir, answers)
    entries = [(entry, node) for node, answer in answers.items() for entry in answer["runs"]]
    remote = {entry["name"]: entry["created_at"] or 0.0 for entry, _ in entries}
    created = {paths.name: run_folder.created_at(paths) for paths in local}
    if name is None:
        undecided = [run for run in open_here if unreachable or _is_beginning(RunPaths(runs_dir / run))]
        chosen = meant(created | remote, {entry["name"] for entry, _ in entries if entry["alive"]}, undecided, say)
    else:
        known = created | remote
        chosen = run_names.choose(name, sorted(known, key=lambda run: known[run], reverse=True))
    if chosen is None:
        if unreachable and not answers:
            raise next(iter(unreachable.values()))
        raise _unknown(runs_dir, name, [*remote, *created], len(answers))
    if chosen in created:
        return RunPaths(runs_dir / chosen)
    return adoption.adopt(fleet, RunPaths(runs_dir / chosen), [node for entry, node in entries if entry["name"] == chosen])


def _unknown(runs_dir: Path, name: str | None, known: list[str], node_count: int) -> HomelabError:
    """The error for a run that neither this controller nor a node that answered (`node_count` of them) knows."""
    if name is None:
        return InputError("there is no run yet", where=f"{runs_dir} and {node_count} nodes", hint=homelab("launch RECIPE"))
    if layout.is_usable(name) and os.path.isdir(runs_dir / name):
        return run_folder.damaged(RunPaths(runs_dir / name), "it has no run.json")
    return run_names.unknown(name, known)


def meant(created_at: Mapping[str, float], alive: Collection[str], undecided: Collection[str], say: Say) -> str | None:
    """The run that is meant without a name: one that lives on a node, else one that may live (`undecided`), else the newest of all; None for none.

    `created_at`: seconds since 1970 by the clock of the machine that launched it; only the order among equals depends on it. Of several
    that live the newest is meant, and the person is told.
    """
    order = sorted(created_at, key=lambda run: (created_at[run], run), reverse=True)
    for group in (alive, undecided, order):
        candidates = [run for run in order if run in group]
        if candidates:
            if group is alive and len(candidates) > 1:
                say(
                    f"{len(candidates)} runs are running; homelab takes the newest: {candidates[0]} (not {', '.join(candidates[1:])}: name it to choose it)"
                )
            return candidates[0]
    return None


def _is_beginning(paths: RunPaths) -> bool:
    """Nothing of it is on the nodes yet, and the command that launches it is at work."""
    is_before_start = run_folder.state_of(paths) in ("planned", "shipping", "starting")
    return is_before_start and supervisor_record.is_under_way(store.read_object(paths.supervisor_json))


def _refuse_launching(paths: RunPaths) -> None:
    """Raises LaunchingError while the command is at work that has made this folder, and the folder is not whole yet."""
    until = time.monotonic() + _BEGUN_S
    while os.path.isdir(paths.root) and not os.listdir(paths.root) and time.monotonic() < until:
        time.sleep(0.02)
    record = store.read_object(paths.supervisor_json)
    if record.get("doing") != supervisor_record.LAUNCHING or run_folder.is_whole(paths) or not supervisor_record.is_under_way(record):
        return
    since = record.get("since")
    for_s = f", for {max(0.0, time.time() - since):.0f} s" if isinstance(since, int | float) else ""
    raise LaunchingError(
        "this run is being launched, and nothing of it is on its nodes yet",
        where=f"{paths.name}, by process {record.get('pid')} on this machine{for_s}",
        hint=Hint("wait for it: {}; to end the launch: {}", homelab("status --wait", paths.name), f"kill {record.get('pid')}"),
    )


def _refuse_unreadable(paths: RunPaths) -> None:
    """Raises HomelabError for a folder of another user that this user may not read."""
    try:
        os.stat(paths.run_json)
    except PermissionError as error:
        raise HomelabError(
            "this run's folder cannot be read: permission denied", where=str(paths.root), hint=store.disk_error_hint(paths.run_json, error)
        ) from error
    except OSError:
        return
