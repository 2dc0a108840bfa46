"""What the controller's folder of a run says: its recipe, its plans, its state. A folder that is not whole is repaired from the nodes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError

from homelab.config.cluster import is_node_name
from homelab.config.recipe import Recipe, parse_recipe
from homelab.errors import HomelabError
from homelab.planning.types import Plan
from homelab.protocol import layout
from homelab.remote.fanout import Fleet
from homelab.runs import event_log, store
from homelab.runs.events import event
from homelab.runs.paths import RunPaths
from homelab.runs.poll_reply import is_moment
from homelab.runs.state import State
from homelab.text.hint import Hint, homelab
from homelab.text.say import Say


@dataclass(frozen=True)
class Description:
    """run.json as it is written, and the recipe in it."""

    run_json: Mapping[str, Any]
    recipe: Recipe


def description_of(paths: RunPaths) -> Description:
    """Raises HomelabError when the run's folder is damaged."""
    run_json = store.read_object(paths.run_json)
    recipe = recipe_in(run_json)
    if recipe is None:
        raise damaged(paths, "run.json is not whole" if os.path.exists(paths.run_json) else "run.json is not in it")
    return Description(run_json, recipe)


def recipe_in(run_json: Mapping[str, Any]) -> Recipe | None:
    """None for what is no whole run.json."""
    try:
        for entry in run_json["data"].values():
            if entry is not None and not {"path", "name", "sha256", "kind"} <= entry.keys():
                return None
        return parse_recipe(run_json["recipe"], strict=False)
    except (ValidationError, KeyError, AttributeError, TypeError):
        return None


def state_of(paths: RunPaths) -> str:
    """The state as this controller last saw it, "planned" where that cannot be read."""
    state = store.read_object(paths.state_json).get("state")
    return state if isinstance(state, str) and state in get_args(State) else "planned"


def created_at(paths: RunPaths) -> float:
    """Seconds since 1970 by the clock of the machine that launched it; 0 where that cannot be read."""
    moment = store.read_object(paths.run_json).get("created_at")
    return float(moment) if isinstance(moment, int | float) and is_moment(moment) else 0.0


def attempts(paths: RunPaths) -> list[int]:
    """Numbers of the attempts that have a folder here, the newest first."""
    numbers = [int(path.name) for path in (paths.root / layout.ATTEMPTS).glob("*") if path.name.isdecimal()]
    return sorted(numbers, reverse=True)


def plan_of(paths: RunPaths, attempt: int | None = None) -> Plan:
    """The plan of an attempt, the newest that can be read by default. Raises HomelabError when the run's folder is damaged."""
    for number in [attempt] if attempt else attempts(paths):
        plan = _read_plan(paths, number)
        if plan is not None:
            return plan
    raise damaged(paths, "no plan in it can be read")


def resume_steps(paths: RunPaths) -> dict[int, int]:
    """Attempt -> the step after which it went on, of the plans that can be read."""
    plans = {number: _read_plan(paths, number) for number in attempts(paths)}
    return {number: plan.resume_step for number, plan in plans.items() if plan is not None}


def _read_plan(paths: RunPaths, number: int) -> Plan | None:
    return plan_in(store.read_json(paths.plan_json(number)), paths.name, number)


def plan_in(value: Any, run: str, number: int) -> Plan | None:
    """None for what is no plan, or that of another run or attempt (a copied folder), or names nodes as none can be called."""
    try:
        plan = Plan.model_validate(value)
    except ValidationError:
        return None
    names = {plan.head, *(node.name for node in plan.nodes), *(rank.node for rank in plan.ranks)}
    return plan if (plan.run, plan.attempt) == (run, number) and all(map(is_node_name, names)) else None


def is_whole(paths: RunPaths) -> bool:
    """False when run.json or the newest plan cannot be read."""
    numbers = attempts(paths)
    if recipe_in(store.read_object(paths.run_json)) is None:
        return False
    return bool(numbers) and _read_plan(paths, numbers[0]) is not None


def damaged(paths: RunPaths, damage: str) -> HomelabError:
    """The error for a folder that cannot be used."""
    aside = shlex.quote(str(paths.root))
    return HomelabError(
        f"this run's folder is damaged: {damage}, and no node that answers has it",
        where=str(paths.root),
        hint=Hint("put it aside: mv {} {}.damaged; where a node is off that had the run: {}", aside, aside, homelab("preflight --only ssh")),
    )


def repair(fleet: Fleet, paths: RunPaths, say: Say) -> None:
    """Take what cannot be read of run.json and the plans from the nodes. Does nothing for a whole folder.

    An attempt of which only its number is left, here and on all nodes, did not come to its start: the plan before it counts.
    Raises HomelabError when no node that answers has what is missing.
    """
    if is_whole(paths):
        return
    say(f"the folder of {paths.name} is damaged: asking the nodes for it")
    answers, unreachable = fleet.ask("describe", {"run": paths.name})
    newest_on_nodes = max((int(number) for answer in answers.values() for number in answer["plans"]), default=0)
    for node, answer in answers.items():
        restored = []
        if answer["run_json"] and recipe_in(answer["run_json"]) and not recipe_in(store.read_object(paths.run_json)):
            store.write_json(paths.run_json, answer["run_json"])
            restored.append("run.json")
        restored += [f"the plan of attempt {number}" for number in _take_plans(paths, answer["plans"])]
        if restored:
            event_log.append(paths, event("mended", node=node, files=", ".join(restored)))
    if is_whole(paths):
        return
    description_of(paths)
    if not unreachable and plan_of(paths).attempt >= newest_on_nodes:
        return
    raise damaged(paths, f"{paths.plan_json(max([newest_on_nodes, *attempts(paths)])).relative_to(paths.root)} cannot be read")


def _take_plans(paths: RunPaths, plans: Mapping[str, Any]) -> list[int]:
    """Keep those plans of a node that cannot be read here; their attempts."""
    restored = []
    for number, value in ((int(key), plan) for key, plan in plans.items()):
        if _read_plan(paths, number) is None and plan_in(value, paths.name, number):
            store.write_json(paths.plan_json(number), value)
            restored.append(number)
    return restored


def adopt(fleet: Fleet, paths: RunPaths, node: str) -> RunPaths:
    """Make the controller's folder of a run that was launched elsewhere, from what a node has of it."""
    described = fleet.agent(node).ask("describe", {"run": paths.name})
    if not described["run_json"] or not described["plans"]:
        raise HomelabError("the node has this run's folder, but not its description", where=f"node {node}", hint=homelab("runs"))
    try:
        for number, plan in described["plans"].items():
            assert plan is None or plan_in(plan, paths.name, int(number))
        parse_recipe(described["run_json"]["recipe"], strict=False)
    except (ValidationError, KeyError, AssertionError) as error:
        raise HomelabError(
            "this node's description of the run is damaged", where=f"node {node}, run {paths.name}", hint=homelab("runs")
        ) from error
    for number, plan in described["plans"].items():
        if plan is not None:
            store.write_json(paths.plan_json(int(number)), plan)
    store.write_json(paths.cluster_json, fleet.cluster.model_dump(mode="json"))
    store.write_text(paths.readme_txt, store.README)
    event_log.append(paths, event("adopted", node=node))
    store.write_json(paths.run_json, described["run_json"])
    return paths


def refresh(fleet: Fleet, paths: RunPaths, node: str) -> Plan:
    """The newest plan as a node has it, kept beside the older ones: another controller may have recovered the run."""
    _take_plans(paths, fleet.agent(node).ask("describe", {"run": paths.name})["plans"])
    return plan_of(paths)
