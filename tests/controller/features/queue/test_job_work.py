"""What the runner does on nodes, over the real verbs of nodes that are folders: who is busy, who does not answer, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from homelab.controller.base.errors import InputError, UnreachableError
from homelab.controller.config import load
from homelab.controller.features.queue import job_work
from homelab.controller.features.queue.job_work import JobWork, NotYetError, digests
from homelab.controller.features.queue.queue_folder import QueueFolder
from homelab.controller.features.queue.queue_run import QueueRun
from homelab.controller.features.queue.queued_job import QueuedJob
from homelab.controller.features.recover.recover_run import RecoverRequest
from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths
from tests.controller.features.queue.practice_nodes import filled
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(120)
RECIPE = '[model]\nname = "/nowhere/model"\n[data]\ntrain = "chats.jsonl"\n[method]\nkind = "lora"\n[train]\nglobal_batch = 8\nsteps = 2\nlearning_rate = 1e-3\n'
ENTRY = {"name": "2026-11-21-1405-demo", "created_at": 1.0, "attempt": 1, "alive": True, "exit": None, "final": False, "busy": ""}


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    fleet = FakeFleet(tmp_path / "nodes").replace_connections(monkeypatch)
    (tmp_path / "cluster.toml").write_text(load.cluster_text(fleet.cluster))
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "q"}]}) + "\n")
    (tmp_path / "law.toml").write_text(RECIPE)
    return fleet


@pytest.fixture
def work(tmp_path: Path, fleet: FakeFleet) -> JobWork:
    return JobWork(tmp_path / "cluster.toml", tmp_path / "runs", "no", lambda text: None)


def added(folder: Path, **fields: object) -> QueuedJob:
    file = folder / "law.toml"
    found = digests(load.load_recipe(file), file)
    return QueuedJob(number=1, recipe=str(file), text=RECIPE, digests=found, **fields)  # type: ignore[arg-type]


def test_a_node_with_a_run_is_not_free_and_one_that_is_off_is_waited_for(tmp_path: Path, fleet: FakeFleet, work: JobWork) -> None:
    assert work.every() == ("tower", "laptop", "oldtower") and work.busy(added(tmp_path)) == ""
    fleet.answer("runs", {"runs": [ENTRY]}, ["laptop"])
    assert work.busy(added(tmp_path)) == "2026-11-21-1405-demo is at work on laptop"
    assert work.busy(added(tmp_path, nodes=("tower",))) == "" == work.busy(added(tmp_path, run="2026-11-21-1405-demo"))
    fleet.nodes["oldtower"].is_off = True
    assert work.busy(added(tmp_path)).startswith("oldtower does not answer: ")
    with pytest.raises(InputError, match='no node is called "towr" any more'):
        work.busy(added(tmp_path, nodes=("towr",)))


def test_data_that_has_changed_is_another_training(tmp_path: Path, work: JobWork) -> None:
    job = added(tmp_path)
    (tmp_path / "chats.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="its train data has changed since the job was added"):
        work.launch(job, lambda run: None, lambda: None)


def test_a_launch_that_a_silent_node_refuses_is_tried_later(tmp_path: Path, fleet: FakeFleet, work: JobWork) -> None:
    for node in fleet.nodes.values():
        node.is_off = True
    with pytest.raises(NotYetError) as refused:
        work.launch(added(tmp_path), lambda run: None, lambda: None)
    assert isinstance(refused.value.__cause__, UnreachableError)


def test_a_run_of_which_nothing_was_sent_is_none(tmp_path: Path, work: JobWork) -> None:
    paths = RunPaths(tmp_path / "runs" / "2026-11-26-2300-law")
    store.write_json(paths.run_json, {})
    job = added(tmp_path, run=paths.name)
    assert not work.was_sent(job) and work.look(job) is None and not paths.root.exists()
    store.set_state(paths, "shipping", 1)
    assert work.was_sent(job) and not work.was_sent(added(tmp_path))


@pytest.mark.parametrize("run", ["", ".", "..", "../runs", "a/b"])
def test_a_job_whose_run_has_no_name_costs_no_other_run(tmp_path: Path, work: JobWork, run: str) -> None:
    """Of nothing that was sent, the folder is removed: of an empty name it was that of all runs."""
    paths = RunPaths(tmp_path / "runs" / "2026-11-26-2300-other")
    store.write_json(paths.run_json, {})
    assert work.look(added(tmp_path, state="running", run=run)) is None
    assert paths.run_json.is_file()


def test_a_job_goes_on_from_what_was_saved(tmp_path: Path, fleet: FakeFleet, work: JobWork, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began again at step 0 each night: everything that the night before had trained was lost."""
    asked: list[RecoverRequest] = []
    monkeypatch.setattr(job_work, "recover_run", lambda fleet, request, view: asked.append(request))
    work.resume(added(tmp_path, run="2026-11-26-2300-law"))
    assert [request.from_scratch for request in asked] == ["if-nothing-was-saved"]


def test_the_runner_waits_for_nodes_that_are_off_and_says_so_once(tmp_path: Path, fleet: FakeFleet) -> None:
    said: list[str] = []
    work = JobWork(tmp_path / "cluster.toml", tmp_path / "runs", "no", said.append)
    queue = filled(QueueFolder(tmp_path / "runs"), added(tmp_path))
    fleet.nodes["laptop"].is_off = True
    runner = QueueRun(queue, work, said.append)
    runner.look()
    runner.look()
    (waits,) = queue.listing().waiting
    assert waits.because.startswith("laptop does not answer: ") and len(said) == 1 and "waits: laptop does not answer" in said[0]
    (tmp_path / "cluster.toml").write_text("[[nodes]")
    runner.look()
    runner.look()
    assert len(said) == 2 and "nothing is started" in said[1], said
