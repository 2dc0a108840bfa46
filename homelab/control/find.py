"""Which run is meant, and where it is known: this controller's folder, or the nodes, where the truth is."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from homelab.config.cluster import Cluster, is_node_name
from homelab.config.recipe import Recipe
from homelab.control import by_hand, leftovers
from homelab.errors import HomelabError, InputError
from homelab.planning.model import Plan
from homelab.remote.fanout import Fleet
from homelab.runs import store
from homelab.runs.paths import RunPaths
from homelab.runs.reply import is_moment
from homelab.runs.state import FINISHED, State

Say = Callable[[str], None]


def run(fleet: Fleet, runs_dir: Path, name: str | None, say: Say) -> RunPaths:
    """The run meant: by name, or the one that lives, or the newest. One that only the nodes know is adopted into `runs_dir`.

    Without a name the nodes are asked which lives, unless the newest of this folder is the only one in it that has not ended. A damaged folder is mended from what the nodes have.

    Raises InputError when nobody knows it, UnreachableError when no node could be asked either, HomelabError when its folder
    is damaged and no node that answers has it.
    """
    chosen = _choose(fleet, runs_dir, name, say)
    mend(fleet, chosen, say)
    fleet.train_with(recipe_of(chosen)[1])
    return chosen


def mend(fleet: Fleet, paths: RunPaths, say: Say) -> None:
    """Have the run's folder whole again: somebody may have deleted it in the middle of the run. Raises HomelabError when no node that answers has it."""
    if not is_whole(paths):
        say(f"the folder of {paths.name} is damaged: asking the nodes for it")
        _mend(fleet, paths)


def _choose(fleet: Fleet, runs_dir: Path, name: str | None, say: Say) -> RunPaths:
    local = store.runs_in(runs_dir)
    created = {paths.name: _created_at(paths) for paths in local}
    newest = max(local, key=_created_at, default=None)
    open_here = [paths.name for paths in local if _state(paths) not in FINISHED]
    if name is None and newest and open_here == [newest.name]:
        return newest
    if name is not None:
        chosen = store.choose(name, [paths.name for paths in local])
        if chosen:
            return RunPaths(runs_dir / chosen)
        if re.fullmatch(store.USABLE_NAME, name):
            _refuse_unreadable(RunPaths(runs_dir / name))
    say("asking the nodes for their runs")
    answers, unreachable = fleet.ask("runs")
    leftovers.tell(runs_dir, answers)
    known = [(entry, node) for node, answer in answers.items() for entry in answer["runs"]]
    remote = {entry["name"]: entry["created_at"] or 0.0 for entry, _ in known}
    if name is None:
        undecided = [run for run in open_here if unreachable or _is_beginning(RunPaths(runs_dir / run))]
        found = meant(created | remote, {entry["name"] for entry, _ in known if entry["alive"]}, undecided, say)
    else:
        found = store.choose(name, sorted(remote, key=lambda run: remote[run], reverse=True))
    if found is not None and found in created:
        return RunPaths(runs_dir / found)
    if found is None:
        if unreachable and not answers:
            raise next(iter(unreachable.values()))
        if name is not None and re.fullmatch(store.USABLE_NAME, name) and os.path.isdir(runs_dir / name):
            raise _damaged(RunPaths(runs_dir / name), "run.json is not in it")
        if name is not None:
            raise store.unknown(name, [*remote, *created])
        raise InputError(
            "there is no run yet", where=f"{runs_dir} and {len(answers)} nodes", hint="homelab launch RECIPE"
        )
    node = next(node for entry, node in known if entry["name"] == found)
    return _adopt(fleet, RunPaths(runs_dir / found), node)


def meant(created_at: Mapping[str, float], alive: Collection[str], undecided: Collection[str], say: Say) -> str | None:
    """The run that is meant without a name: one that lives on a node, else one that may live (`undecided`), else the newest of all; None for none.

    `created_at`: seconds since 1970 by the clock of who launched it, of which nothing but the order among equals depends. Of several that
    live the newest is meant, and the person is told.
    """
    order = sorted(created_at, key=lambda run: (created_at[run], run), reverse=True)
    for some in (alive, undecided, order):
        found = [run for run in order if run in some]
        if found:
            if some is alive and len(found) > 1:
                say(f"{len(found)} runs live; the newest is meant: {found[0]} (not {', '.join(found[1:])}: to mean it, name it)")
            return found[0]
    return None


def _is_beginning(paths: RunPaths) -> bool:
    """Nothing of it is on the nodes yet, and the command that launches it is at work."""
    return _state(paths) in ("planned", "shipping", "starting") and by_hand.is_under_way(store.read_object(paths.supervisor_json))


def _refuse_unreadable(paths: RunPaths) -> None:
    """It may be that of another user, who lets nobody look into it."""
    try:
        os.stat(paths.run_json)
    except PermissionError as error:
        raise HomelabError(
            "this run's folder cannot be read: permission denied",
            where=str(paths.root),
            hint=store.mend(paths.run_json, error),
        ) from error
    except OSError:
        return


def _state(paths: RunPaths) -> str:
    """As this controller last saw it, "planned" where that cannot be read."""
    state = store.read_object(paths.state_json).get("state")
    return state if isinstance(state, str) and state in get_args(State) else "planned"


def _created_at(paths: RunPaths) -> float:
    moment = store.read_object(paths.run_json).get("created_at")
    return float(moment) if isinstance(moment, int | float) and is_moment(moment) else 0.0


def plan_of(paths: RunPaths, attempt: int | None = None) -> Plan:
    """The plan of an attempt, the newest that can be read by default. Raises HomelabError when the run's folder is damaged."""
    for number in [attempt] if attempt else attempts(paths):
        plan = _read_plan(paths, number)
        if plan is not None:
            return plan
    raise _damaged(paths, "no plan in it can be read")


def recipe_of(paths: RunPaths) -> tuple[dict[str, Any], Recipe]:
    """run.json, and the recipe in it. Raises HomelabError when the run's folder is damaged."""
    described = store.read_object(paths.run_json)
    recipe = _recipe_in(described)
    if recipe is None:
        raise _damaged(paths, "run.json is not whole" if os.path.exists(paths.run_json) else "run.json is not in it")
    return described, recipe


def _recipe_in(described: dict[str, Any]) -> Recipe | None:
    """None for what is no whole run.json."""
    try:
        for entry in described["data"].values():
            if entry is not None and not {"path", "name", "sha256", "kind"} <= entry.keys():
                return None
        return Recipe.model_validate(described["recipe"], strict=False)
    except (ValidationError, KeyError, AttributeError, TypeError):
        return None


def is_whole(paths: RunPaths) -> bool:
    """False when run.json or the newest plan cannot be read."""
    numbers = attempts(paths)
    if _recipe_in(store.read_object(paths.run_json)) is None:
        return False
    return bool(numbers) and _read_plan(paths, numbers[0]) is not None


def attempts(paths: RunPaths) -> list[int]:
    """Numbers of the attempts that have a folder here, the newest first."""
    found = [int(path.name) for path in (paths.root / "attempts").glob("*") if path.name.isdecimal()]
    return sorted(found, reverse=True)


def resumed(paths: RunPaths) -> dict[int, int]:
    """Attempt -> the step after which it went on, of the plans that can be read."""
    plans = {number: _read_plan(paths, number) for number in attempts(paths)}
    return {number: plan.resume_step for number, plan in plans.items() if plan is not None}


def _read_plan(paths: RunPaths, number: int) -> Plan | None:
    return _plan_in(store.read_json(paths.plan_json(number)), paths.name, number)


def _plan_in(value: Any, run: str, number: int) -> Plan | None:
    """None for what is no plan, or that of another run or attempt (a copied folder), or names nodes as none can be called."""
    try:
        plan = Plan.model_validate(value)
    except ValidationError:
        return None
    names = {plan.head, *(node.name for node in plan.nodes), *(rank.node for rank in plan.ranks)}
    return plan if (plan.run, plan.attempt) == (run, number) and all(map(is_node_name, names)) else None


def _damaged(paths: RunPaths, what: str) -> HomelabError:
    aside = shlex.quote(str(paths.root))
    return HomelabError(
        f"this run's folder is damaged: {what}, and no node that answers has it",
        where=str(paths.root),
        hint=f"put it aside: mv {aside} {aside}.damaged; where a node is off that had the run: homelab preflight --only ssh",
    )


def _mend(fleet: Fleet, paths: RunPaths) -> None:
    """Take what cannot be read of run.json and the plans from whatever nodes have it. Raises HomelabError when none has.

    An attempt of which only its number is left, here and on all nodes, did not come to its start: the plan before it counts.
    """
    answers, unreachable = fleet.ask("describe", {"run": paths.name})
    known = 0  # the newest attempt that a node has a folder of
    for node, answer in answers.items():
        taken = []
        known = max([known, *map(int, answer["plans"])])
        if answer["run_json"] and _recipe_in(answer["run_json"]) and not _recipe_in(store.read_object(paths.run_json)):
            store.write_json(paths.run_json, answer["run_json"])
            taken.append("run.json")
        for number, value in ((int(key), plan) for key, plan in answer["plans"].items()):
            if _read_plan(paths, number) is None and _plan_in(value, paths.name, number):
                store.write_json(paths.plan_json(number), value)
                taken.append(f"the plan of attempt {number}")
        if taken:
            store.event(paths, f"mended from {node}: {', '.join(taken)}")
    if is_whole(paths):
        return
    recipe_of(paths)
    if not unreachable and plan_of(paths).attempt >= known:
        return
    raise _damaged(paths, f"{paths.plan_json(max([known, *attempts(paths)])).relative_to(paths.root)} cannot be read")


def all_runs(fleet: Fleet, runs_dir: Path, say: Say) -> tuple[list[dict[str, Any]], dict[str, HomelabError]]:
    """Every run anybody knows, newest first: name, state, attempt, created_at, nodes; and the nodes that could not be asked."""
    say("asking the nodes for their runs")
    answers, unreachable = fleet.ask("runs")
    leftovers.tell(runs_dir, answers)
    rows: dict[str, dict[str, Any]] = {}
    for paths in store.runs_in(runs_dir):
        attempt = store.read_object(paths.state_json).get("attempt")
        rows[paths.name] = {
            "name": paths.name,
            "state": _state(paths),
            "attempt": attempt if isinstance(attempt, int) else 0,
            "created_at": _created_at(paths) or None,
            "nodes": [],
            "seen": [],
        }
    for node, answer in answers.items():
        for entry in answer["runs"]:
            row = rows.setdefault(
                entry["name"],
                {
                    "name": entry["name"],
                    "state": "",
                    "attempt": 0,
                    "created_at": entry["created_at"],
                    "nodes": [],
                    "seen": [],
                },
            )
            row["nodes"].append(node)
            row["seen"].append(entry)
    for row in rows.values():
        _judge(row)
    return sorted(rows.values(), key=lambda row: row["created_at"] or 0.0, reverse=True), unreachable


def _judge(row: dict[str, Any]) -> None:
    """A short state from what the nodes said; `homelab status` looks closer."""
    seen = row.pop("seen")
    if not seen:
        return
    newest = max(entry["attempt"] for entry in seen)
    if newest < row["attempt"] and row["state"] in FINISHED:  # who took part in the end is off now
        return
    row["attempt"] = newest
    current = [entry for entry in seen if entry["attempt"] == row["attempt"]]
    # As `homelab status` has it: once its end is written down an attempt is over, whatever somebody has started by hand since.
    if any(entry["alive"] and not entry["exit"] for entry in current):
        row["state"] = "running"
    elif any(entry["final"] for entry in seen) or all(_ended_well(entry) for entry in current):
        row["state"] = "done"
    elif any(entry["exit"] and entry["exit"]["stopped"] for entry in current):
        row["state"] = "stopped"
    elif current:
        row["state"] = "failed"


def _ended_well(entry: dict[str, Any]) -> bool:
    """A [script] leaves no final model: there the exit codes of all nodes tell."""
    return bool(entry["exit"]) and entry["exit"]["returncode"] == 0


def _adopt(fleet: Fleet, paths: RunPaths, node: str) -> RunPaths:
    """Make the controller's folder of a run that was launched elsewhere, from what a node has of it."""
    described = fleet.agent(node).ask("describe", {"run": paths.name})
    if not described["run_json"] or not described["plans"]:
        raise HomelabError(
            "the node has this run's folder, but not its description", where=f"node {node}", hint="homelab runs"
        )
    try:
        for number, plan in described["plans"].items():
            assert plan is None or _plan_in(plan, paths.name, int(number))
        Recipe.model_validate(described["run_json"]["recipe"], strict=False)
    except (ValidationError, KeyError, AssertionError) as error:
        raise HomelabError(
            "this node's description of the run is damaged", where=f"node {node}, run {paths.name}", hint="homelab runs"
        ) from error
    cluster: Cluster = fleet.cluster
    for number, plan in described["plans"].items():
        if plan is not None:
            store.write_json(paths.plan_json(int(number)), plan)
    store.write_json(paths.cluster_json, cluster.model_dump(mode="json"))
    store.write_text(paths.readme_txt, store.README)
    store.event(paths, f"adopted from {node}")
    store.write_json(paths.run_json, described["run_json"])
    return paths


def refresh(fleet: Fleet, paths: RunPaths, node: str) -> Plan:
    """The newest plan as a node has it, kept beside the older ones: another controller may have recovered the run."""
    for number, plan in fleet.agent(node).ask("describe", {"run": paths.name})["plans"].items():
        if _read_plan(paths, int(number)) is None and _plan_in(plan, paths.name, int(number)):
            store.write_json(paths.plan_json(int(number)), plan)
    return plan_of(paths)
