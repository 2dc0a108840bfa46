"""`homelab recover` where it must not go on, or only with what can still be had: nothing half done, and the run as it was."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.run.paths import RunPaths
from homelab.lab import Lab
from scripts.practice.desk import Desk, Run, left_on, read_rest, read_until, wait_until_none_left
from tests.cli.conftest import complaint
from tests.e2e import conftest

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(300)]

NODES = ("node1", "node2")
RECOVER = ("recover", "--nodes", ",".join(NODES), "--skip", "collective")


@dataclass(frozen=True)
class Stopped:
    """A run that was stopped after its second checkpoint; `restore` puts all its folders back as they were then."""

    desk: Desk
    run: Run
    model: Path
    kept: Path

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.desk.folder / "runs" / self.run.name)

    def folders(self) -> dict[str, Path]:
        return {"desk": self.paths.root} | {node: self.run.folder(node) for node in NODES}

    def restore(self) -> None:
        for name, folder in self.folders().items():
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(self.kept / name, folder)

    @property
    def newest(self) -> int:
        """Step of the newest checkpoint that was kept on node1."""
        return max(int(folder.name.removeprefix("step-")) for folder in (self.kept / "node1" / "checkpoints").glob("step-*"))

    def checkpoints(self) -> list[Path]:
        return [folder for node in NODES for folder in sorted((self.run.folder(node) / "checkpoints").glob("step-*"))]


@pytest.fixture(scope="module")
def only_once(base: Path, desk: Desk, model: Path) -> Stopped:
    text = conftest.recipe(model, length="epochs = 400").replace("every_steps = 10", "every_steps = 3")
    desk.write("long.toml", text.replace(", node3 = 2", "").replace("node2 = 4", "node2 = 6"))
    run = desk.launch("long.toml", "--nodes", ",".join(NODES))
    run.wait_for_step(1, 7)
    assert desk.json("stop", run.name)["clean"]
    found = Stopped(desk, run, model, base / "kept")
    # The stop may have come when only one of them had written its newest.
    names = [{folder.name for folder in (run.folder(node) / "checkpoints").glob("step-*")} for node in NODES]
    for folder in found.checkpoints():
        if folder.name not in set.intersection(*names):
            shutil.rmtree(folder)
    for name, folder in found.folders().items():
        shutil.copytree(folder, found.kept / name)
    return found


@pytest.fixture
def stopped(only_once: Stopped) -> Iterator[Stopped]:
    only_once.restore()
    yield only_once
    if left_on(only_once.desk.lab):
        only_once.desk.homelab("stop", only_once.run.name, code=None)


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def edited_recipe(at: Stopped) -> None:
    edit(at.paths.run_json, lambda value: value["recipe"]["train"].update(learning_rate=0.005))


def edited_recipe_and_fingerprint(at: Stopped) -> None:
    """By somebody who knows how."""
    from homelab.controller.run import fingerprint

    edited_recipe(at)
    edit(at.paths.run_json, lambda value: value.update(recipe_hash=fingerprint.fingerprint(value)))


def foreign_checkpoint(at: Stopped) -> None:
    """Copied in from another run, which this machine knows."""
    other = at.desk.folder / "runs" / "2026-01-01-0000-other"
    shutil.copytree(at.paths.root, other, dirs_exist_ok=True)
    edit(other / "run.json", lambda value: (value["recipe"]["train"].update(seed=7), value.update(recipe_hash="f" * 16)))
    for folder in at.checkpoints():
        edit(folder / "complete.json", lambda value: value.update(recipe_hash="f" * 16))


def damaged_checkpoints(at: Stopped) -> None:
    for folder in at.checkpoints():
        content = bytearray((folder / "optimizer.pt").read_bytes())
        content[100] ^= 1
        (folder / "optimizer.pt").write_bytes(content)


def no_checkpoints(at: Stopped) -> None:
    for folder in at.checkpoints():
        shutil.rmtree(folder)


def gone_from_the_nodes(at: Stopped) -> None:
    for node in NODES:
        shutil.rmtree(at.run.folder(node))


def other_model(at: Stopped) -> None:
    config = json.loads((at.model / "config.json").read_text()) | {"rope_scaling_factor": 8.0}
    edit(at.paths.run_json, lambda value: value.update(model={"config": config, "files": {}}))


def too_few(at: Stopped) -> None:
    edit(at.paths.run_json, lambda value: value["recipe"]["recovery"].update(min_nodes=3))


REFUSED: list[tuple[Callable[[Stopped], None], tuple[str, ...]]] = [
    (edited_recipe, ("train.learning_rate: 0.01 -> 0.005", "run.json", "homelab launch long.toml")),
    (edited_recipe_and_fingerprint, ("train.learning_rate: 0.01 -> 0.005", "run.json", "homelab launch long.toml")),
    (foreign_checkpoint, ("2026-01-01-0000-other; from there to here: train.seed: 7 -> 42", "node node1", "mv ")),
    (damaged_checkpoints, ("is complete", "on node2: optimizer.pt has changed since", "--from-scratch")),
    (no_checkpoints, ("no complete checkpoint is left", "--from-scratch")),
    (gone_from_the_nodes, ("no node knows this run", "--from-scratch")),
    (other_model, ("config.json, rope_scaling_factor: 8.0 -> null", "node node1", "put the old model back")),
    (too_few, ("2 nodes are left", "min_nodes is 3", "recipe.recovery.min_nodes", "bring a node back")),
]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(
            *case, marks=() if case[0] in (edited_recipe, damaged_checkpoints, too_few) else pytest.mark.thorough, id=case[0].__name__
        )
        for case in REFUSED
    ],
)
def test_refused_and_left_as_it_was(stopped: Stopped, spoil: Callable[[Stopped], None], said: tuple[str, ...]) -> None:
    spoil(stopped)
    error = complaint(stopped.desk, *RECOVER, stopped.run.name, code=1, as_json=False)
    assert all(part in " ".join(error.values()) for part in said), error
    wait_until_none_left(stopped.desk.lab)
    assert set(stopped.run.attempts()) <= {1} and not stopped.paths.attempt(2).exists()
    assert json.loads(stopped.paths.state_json.read_text())["state"] == "stopped"
    shutil.rmtree(stopped.desk.folder / "runs" / "2026-01-01-0000-other", ignore_errors=True)


@pytest.mark.thorough  # cli/test_runs has one such folder
def test_half_deleted_folders_are_mended_and_a_run_that_goes_on_is_refused(stopped: Stopped, lab: Lab, base: Path) -> None:
    desk, run, paths = stopped.desk, stopped.run, stopped.paths
    paths.run_json.unlink()
    paths.plan_json(1).write_text(paths.plan_json(1).read_text()[:300])
    paths.state_json.write_text('{"state": [5], "attempt": {}, "intent": 5}')
    paths.supervisor_json.write_text('{"restarts": 5, "doing": [], "step_s": "x", "pid": "y"}')
    paths.attempt(2).mkdir()  # killed before it had a plan
    shutil.rmtree(paths.code)
    shutil.rmtree(run.folder("node2"))
    for verb in (["status", "--once"], ["why"], ["stop"]):
        desk.homelab(verb[0], run.name, *verb[1:])
    again = desk.json(*RECOVER, run.name)
    assert (again["attempt"], again["resume_step"]) == (3, stopped.newest)
    run.wait_for_step(3, stopped.newest + 2)

    # One of its nodes answers no more, and the steps of the others go on.
    cut = Desk(desk.folder, lab, with_a_closed_port(lab, base / "cut.toml", "node2"))
    error = complaint(cut, "recover", run.name, code=2, as_json=False)
    assert "is still training, although some nodes do not answer" in error["message"] and "node2" in error["where"]
    assert run.attempts() == [1, 3] and not run.exits(3)


def with_a_closed_port(lab: Lab, file: Path, node: str) -> Path:
    """cluster.toml where a node cannot be reached, but is well."""
    text = lab.cluster_file.read_text()
    parsed = tomllib.loads(text)
    for name in (parsed["cluster"]["known_hosts"], parsed["defaults"]["identity_file"]):
        text = text.replace(f'"{name}"', f'"{lab.folder / name}"')
    assert f'name = "{node}"\n' in text
    assert "port" not in next(entry for entry in parsed["nodes"] if entry["name"] == node)
    file.write_text(text.replace(f'name = "{node}"\n', f'name = "{node}"\nport = 1\n'))
    return file


def test_two_at_once_start_one_attempt(stopped: Stopped) -> None:
    both = [stopped.desk.spawn(*RECOVER, stopped.run.name) for _ in range(2)]
    said = [read_rest(process, timeout_s=60) for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    refused = said[0 if both[0].returncode else 1]
    assert "already working on this run" in refused or "there is nothing to recover" in refused, refused
    assert stopped.run.attempts() == [1, 2]


@pytest.mark.parametrize(
    ("marker", "delay_s"),
    [
        pytest.param(". starting torchrun", 0.0, marks=pytest.mark.thorough),
        pytest.param(". stopping", 0.1, marks=pytest.mark.thorough),
        pytest.param(". starting torchrun", 0.3, marks=pytest.mark.thorough),
    ],
)
def test_control_c(stopped: Stopped, marker: str, delay_s: float) -> None:
    desk, run = stopped.desk, stopped.run
    controller = desk.spawn(*RECOVER, run.name)
    said = read_until(controller, marker)
    time.sleep(delay_s)  # a moment, not a condition
    os.killpg(controller.pid, signal.SIGINT)
    said += read_rest(controller, timeout_s=60)
    assert "Traceback" not in said, said
    if "continues after step" in said:  # announced: it lives; on a quick machine the signal came when all was said
        assert controller.returncode in (0, 130), said
        assert left_on(desk.lab)
        return
    assert controller.returncode == 130, said
    wait_until_none_left(desk.lab, said)
    if delay_s:
        return
    again = desk.json(*RECOVER, run.name)
    assert (again["attempt"], again["resume_step"]) == (3, stopped.newest)
