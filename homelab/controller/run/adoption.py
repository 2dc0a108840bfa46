"""A run that this machine does not hold whole: what its nodes say it is, taken where they agree, and gone on with when a person has said so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from homelab.controller.base import redact
from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.sanitize import plain
from homelab.controller.facts.node_commands import on_node, path_word
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import event_log, fingerprint, run_record, store
from homelab.controller.run import shipped_files as shipped
from homelab.controller.run.events import event
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import layout
from homelab.shared.protocol.request import RunRequest

_MOST_SHOWN = 20
RUN_DIGEST = "run_json"  # in preflight.json: what run.json was at the launch


@dataclass(frozen=True)
class AdoptedProgram:
    """What the nodes would run of an adopted run, in lines for a person; `nodes` have said so."""

    run: str
    nodes: tuple[str, ...]
    lines: tuple[str, ...]


def adopt(fleet: Fleet, paths: RunPaths, nodes: Sequence[str]) -> RunPaths:
    """Make the controller's folder of a run that was launched elsewhere, from what these nodes have of it.

    Raises HomelabError where they do not agree on what it is, or where no description is whole.
    """
    answers, errors = fleet.ask("describe", RunRequest(run=paths.name), names=nodes)
    if not answers:
        raise next(iter(errors.values()))
    if not any(answer["run_json"] and answer["plans"] for answer in answers.values()):
        raise HomelabError(
            "the node has this run's folder, but not its description", where=f"node {next(iter(answers))}", hint=homelab("runs")
        )
    for node, answer in answers.items():
        _refuse_other_schema(fleet, paths, node, answer)
        fault = _fault(paths, answer)
        if fault:
            raise HomelabError(
                f"this node's description of the run is damaged: {fault}", where=f"node {node}, run {paths.name}",
                hint=Hint("{}; or put it aside there: {}", homelab("runs"), _aside(fleet, node, paths.name)),
            )  # fmt: skip
    run_json = _agreed(fleet, paths, {node: answer["run_json"] for node, answer in answers.items() if answer["run_json"]})
    for answer in answers.values():
        take_plans(paths, answer["plans"])
    store.write_json(paths.cluster_json, fleet.cluster.model_dump(mode="json"))
    store.write_text(paths.readme_txt, store.README)
    agreeing = _keep(paths, run_json, answers, others=len(fleet.cluster.nodes) > 1)
    event_log.append(paths, event("adopted", node=", ".join(agreeing)))
    return paths


def take_description(fleet: Fleet, paths: RunPaths, answers: Mapping[str, Mapping[str, Any]]) -> None:
    """run.json of a damaged folder, from `describe` of the nodes; nothing where none has it whole. Raises HomelabError where they do not agree."""
    whole = {
        node: answer["run_json"]
        for node, answer in answers.items()
        if answer["run_json"] and run_record.fault(answer["run_json"], of_node=True) is None and run_record.is_known(answer["run_json"])
    }
    for node, answer in () if whole else answers.items():
        _refuse_other_schema(fleet, paths, node, answer)
    if whole:
        for node in _keep(paths, _agreed(fleet, paths, whole), answers, others=len(answers) > 1):
            event_log.append(paths, event("mended", node=node, files=layout.RUN_JSON))


def take_plans(paths: RunPaths, plans: Mapping[Any, Any]) -> list[int]:
    """Keep those plans of a node that cannot be read here; their attempts."""
    restored = []
    for number, value in ((int(key), plan) for key, plan in plans.items()):
        is_here = run_record.plan_in(store.read_json(paths.plan_json(number)), paths.name, number) is not None
        if not is_here and run_record.plan_in(value, paths.name, number):
            store.write_json(paths.plan_json(number), value)
            restored.append(number)
    return restored


def to_ask(paths: RunPaths) -> AdoptedProgram | None:
    """What a person is shown and asked for before nodes run it; None for a run of this machine, and for one that was asked for already."""
    record, described = store.read_object(paths.adopted_json), store.read_object(paths.run_json)
    if not record.get("asks"):
        return None
    nodes = record.get("nodes")
    return AdoptedProgram(paths.name, tuple(map(str, nodes)) if isinstance(nodes, list) else (), tuple(_lines(described)))


def accept(paths: RunPaths) -> None:
    """The person wants it."""
    store.write_json(paths.adopted_json, {**store.read_object(paths.adopted_json), "asks": False})
    event_log.append(paths, event("note", text="you saw its program and confirmed it"))


def refuse_unasked(paths: RunPaths) -> None:
    """Raises InputError where nodes would run what nobody here has been asked for."""
    program = to_ask(paths)
    if program is not None:
        raise InputError(
            f"this machine did not launch this run: only {', '.join(program.nodes)} can say what it is", where=f"{paths.name}: {'; '.join(program.lines[:3])}",
            hint=Hint("read what it would run, and confirm it: {}", homelab("recover", paths.name)),
        )  # fmt: skip


def _keep(paths: RunPaths, run_json: Mapping[str, Any], answers: Mapping[str, Mapping[str, Any]], *, others: bool) -> list[str]:
    """Write run.json and who said so; the nodes that did. `others`: nodes would run it that have not said so."""
    agreed, recipe = run_record.digest(run_json), run_json["recipe"]
    agreeing = sorted(node for node, answer in answers.items() if answer["run_json"] and _digest(answer["run_json"]) == agreed)
    is_known = store.read_object(paths.checks_json).get(RUN_DIGEST) == agreed  # this machine launched it
    asks = not is_known and bool(recipe.get("script") or recipe.get("environment") or (others and len(agreeing) < 2))
    store.write_json(paths.adopted_json, {"nodes": agreeing, "sha256": agreed, "asks": asks})
    # No shipped file is said to lie on this machine: only the machine of the launch knows where.
    data = {
        role: {**entry, "path": f"/{shipped.copy_of(entry)}"}
        if entry is not None and entry.get("sent") == "shipped" and shipped.original_of(entry)
        else entry
        for role, entry in run_json["data"].items()
    }
    store.write_json(paths.run_json, {key: value for key, value in run_json.items() if key != "typed" or _is_typed(value)} | {"data": data})
    return agreeing


def _is_typed(value: object) -> bool:
    words = value.get("words") if isinstance(value, dict) else None
    return isinstance(words, list) and all(isinstance(word, str) and word.isprintable() for word in words)


def _digest(run_json: Mapping[str, Any]) -> str:
    return run_record.digest(run_json) if run_record.fault(run_json) is None else ""


def _fault(paths: RunPaths, answer: Mapping[str, Any]) -> str | None:
    """What is wrong with a node's `describe`; None for what is missing in it."""
    for number, plan in answer["plans"].items():
        if plan is not None and run_record.plan_in(plan, paths.name, int(number)) is None:
            return f"the plan of attempt {number} cannot be read"
    return run_record.fault(answer["run_json"], of_node=True) if answer["run_json"] else None


def _agreed(fleet: Fleet, paths: RunPaths, described: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The one description. A copy that was edited, so that its own fingerprint is wrong, has no vote where there is another."""
    unedited = {node: value for node, value in described.items() if fingerprint.fingerprint(value) == value.get("recipe_hash")} or dict(
        described
    )
    by_digest: dict[str, list[str]] = {}
    for node, value in unedited.items():
        by_digest.setdefault(run_record.digest(value), []).append(node)
    if len(by_digest) == 1:
        return next(iter(unedited.values()))
    groups = sorted(by_digest.items(), key=lambda entry: (-len(entry[1]), entry[1]))
    raise HomelabError(
        "the nodes do not agree on what this run is: " + "; ".join(f"{', '.join(nodes)}: run.json is {digest[:12]}" for digest, nodes in groups),
        where=f"run {paths.name}, run.json on {', '.join(unedited)}",
        hint=Hint("check which one is right ({}), move the other away: {}; then run the command again", *(_look_and_aside(fleet, groups[-1][1][0], paths.name))),
    )  # fmt: skip


def _refuse_other_schema(fleet: Fleet, paths: RunPaths, node: str, answer: Mapping[str, Any]) -> None:
    if answer["run_json"]:
        run_record.refuse_other(answer["run_json"], f"node {node}, run {paths.name}", _aside(fleet, node, paths.name))


def _look_and_aside(fleet: Fleet, node: str, run: str) -> tuple[str, str]:
    one = fleet.cluster.node(node)
    return on_node(one, f"cat {path_word(f'{one.workdir}/{layout.run(run)}/{layout.RUN_JSON}')}"), _aside(fleet, node, run)


def _aside(fleet: Fleet, node: str, run: str) -> str:
    one = fleet.cluster.node(node)
    place = path_word(f"{one.workdir}/{layout.run(run)}")
    return on_node(one, f"mv {place} {place}.aside")


def _lines(described: Mapping[str, Any]) -> list[str]:
    """What would run, in words."""
    recipe, data = described.get("recipe") or {}, described.get("data") or {}
    script, environment = recipe.get("script"), recipe.get("environment") or {}
    lines = []
    if script:
        words = [str(word) for word in script.get("args") or ()]
        lines.append(f"its own program {script.get('path')}{' with the arguments ' + ' '.join(words) if words else ''}")
    else:
        lines.append(f"homelab's own worker, for the model {(recipe.get('model') or {}).get('name')}")
    lines += [f"{role}: {entry.get('path')} (sha256 {str(entry.get('sha256'))[:12]})" for role, entry in sorted(data.items()) if entry]
    lines += [f"environment: {name}={value}" for name, value in sorted(environment.items())]
    more = len(lines) - _MOST_SHOWN
    return [plain(redact.text(line))[:300] for line in lines[:_MOST_SHOWN]] + ([f"and {more} more files and variables"] if more > 0 else [])
