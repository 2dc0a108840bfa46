"""The sequence of `homelab runs --prune`: what lies where, and its removal from nodes and from this machine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.say import Say
from homelab.controller.features.results import receive
from homelab.controller.features.status import run_index
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import run_folder, store, supervisor_lock
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.pruning import PrunableRun
from homelab.shared.protocol import files
from homelab.shared.protocol.request import RunRequest

HERE = "this machine"
_WEIGH_S, _REMOVE_S = 120.0, 600.0
_REMOVED = ".removed-"


def candidates(fleet: Fleet, runs_dir: Path, models_dir: Path, say: Say) -> tuple[list[PrunableRun], dict[str, HomelabError]]:
    """Every known run, the newest first, and the nodes that could not be asked. `models_dir`: where fetched models are put."""
    index = run_index.all_runs(fleet, runs_dir, say)
    say("reading their sizes on the nodes")
    answers, failed = fleet.ask("run-weigh", timeout_s=_WEIGH_S)
    silent = {**index.unreachable, **failed}
    local = {paths.name: paths for paths in store.runs_in(runs_dir)}
    found = []
    for row in index.rows:
        on_nodes = {node: answer["runs"][row.name] for node, answer in answers.items() if row.name in answer["runs"]}
        paths = local.get(row.name)
        places = {node: entry["bytes"] for node, entry in on_nodes.items()}
        busy = next((f"{entry['busy']} ({node})" for node, entry in on_nodes.items() if entry["busy"]), "")
        if paths is not None:
            places[HERE] = sum(path.lstat().st_size for path in paths.root.rglob("*"))
            busy = busy or ("its supervisor is working here" if supervisor_lock.is_held(paths) else "")
        fetched = str((files.read_object(models_dir / row.name / receive.RECORD) or {}).get("from", "")).rpartition("/")[2]
        holders = [(node, entry["result"]) for node, entry in on_nodes.items() if entry["result"] not in ("", fetched)]
        node, result = holders[0] if holders else ("", "")
        step = max((entry["step"] for entry in on_nodes.values()), default=0)
        found.append(PrunableRun(row.name, row.state, places, busy, _unasked(paths, silent), node, result, step))
    return found, silent


def _unasked(paths: RunPaths | None, silent: dict[str, HomelabError]) -> Sequence[str]:
    """The nodes that may have the run and did not answer: where its plan is not here, any of them."""
    try:
        names = {node.name for node in run_folder.plan_of(paths).nodes} if paths is not None else set(silent)
    except HomelabError:
        names = set(silent)
    return sorted(names & set(silent))


def remove(fleet: Fleet, runs_dir: Path, run: PrunableRun, say: Say) -> None:
    """Remove it from the nodes, then from here. Raises the first node's error; then its folder here stays, and the next call goes on."""
    say(f"removing {run.name}")
    _, errors = fleet.ask(
        "run-remove", RunRequest(run=run.name), names=[place for place in run.bytes_on if place != HERE], timeout_s=_REMOVE_S
    )
    if errors:
        raise next(iter(errors.values()))
    for half in runs_dir.glob(f"{_REMOVED}*"):  # of a call that was cut off
        shutil.rmtree(half, ignore_errors=True)
    folder = runs_dir / run.name
    if HERE in run.bytes_on:
        with store.disk_errors_as_hints(folder):
            half = folder.with_name(f"{_REMOVED}{run.name}")
            folder.rename(half)
            shutil.rmtree(half)
