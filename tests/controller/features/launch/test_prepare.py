"""From a preflight to a run that is started: what refuses a launch, what the run's folder says, and how a start that fails is written down."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.attempt import start
from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import HomelabError, StoppedError, UnreachableError
from homelab.controller.checks.evidence import Evidence, Finding
from homelab.controller.features.launch import prepare, run_description, start_run
from homelab.controller.features.launch.prepare import Prepared
from homelab.controller.run import event_log, store
from homelab.controller.run.claims import Claim
from homelab.controller.run.paths import RunPaths
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(30)
FULL = Finding("disk.room", "laptop", "fail", "the disk is full", "make room: df -h")
REPLACE = os.replace


def prepared(tmp_path: Path, **fields: Any) -> Prepared:
    """A launch of one training on all nodes, in which nothing is wrong."""
    recipe, cluster = builders.recipe(), builders.cluster()
    recipe_path = tmp_path / "recipe.toml"
    recipe_path.write_text("# as a person wrote it\n")
    facts = {name: builders.facts(name, recipe=recipe) for name in builders.NAMES}
    evidence = Evidence(cluster, "tower", builders.PORT, facts=facts)
    usual: dict[str, Any] = {
        "material": [RecipeInput("train", "on-node", "/data/train.jsonl")], "findings": [], "skipped": ("gpu.memory",), "plan": builders.plan(), "refused": None,
    }  # fmt: skip
    return Prepared(recipe, recipe_path, evidence=evidence, **{**usual, **fields})


def with_silent(launch: Prepared, error: HomelabError) -> Prepared:
    facts = {name: entry for name, entry in launch.evidence.facts.items() if name != "laptop"}
    return replace(launch, evidence=replace(launch.evidence, facts=facts, unreachable={"laptop": error}))


def refusal(launch: Prepared) -> HomelabError:
    with pytest.raises(HomelabError) as raised:
        prepare.refuse_on_failure(launch)
    return raised.value


def test_a_launch_in_which_nothing_is_wrong(tmp_path: Path) -> None:
    prepare.refuse_on_failure(prepared(tmp_path, findings=[replace(FULL, level="warn")]))


def test_the_first_failed_check_is_the_error(tmp_path: Path) -> None:
    error = refusal(prepared(tmp_path, findings=[FULL, replace(FULL, node="tower")]))
    assert error.message == "preflight failed: the disk is full (and 1 more, in the table above)"
    assert error.where == "node laptop, check disk.room"
    assert error.hint == "make room: df -h; to start anyway: --skip disk.room"


def test_what_cannot_work_is_not_offered(tmp_path: Path) -> None:
    """To skip the check of the port gives torchrun the port that is held."""
    held = Finding("network.port", "tower", "fail", "the rendezvous port 29500 is held", "edit the recipe")
    assert refusal(prepared(tmp_path, findings=[held])).hint == "edit the recipe"


def test_a_node_that_cannot_be_reached_gives_its_own_exit_code_and_no_way_around(tmp_path: Path) -> None:
    silent = with_silent(prepared(tmp_path), UnreachableError("no route to host", where="node laptop", hint="wake it"))
    for finding in (
        Finding("ssh.login", "laptop", "fail", "no route to host", "wake it"),
        Finding("ssh.login", "", "fail", "no network here", "wake it"),
    ):
        error = refusal(replace(silent, findings=[finding]))
        assert isinstance(error, UnreachableError)
        assert error.hint == "wake it"


def test_a_silent_node_whose_check_is_skipped_can_be_left_out(tmp_path: Path) -> None:
    error = refusal(with_silent(prepared(tmp_path), UnreachableError("no route to host", hint="wake it")))
    assert (error.message, error.where) == ("no route to host", "node laptop")
    assert error.hint == "wake it; or leave it out: --nodes tower,oldtower"


def test_a_plan_that_cannot_be_speaks_for_the_fit(tmp_path: Path) -> None:
    refused = HomelabError("it does not fit on laptop", where="plan", hint="lower train.max_length")
    too_large = Finding("fit.memory", "laptop", "fail", "too large", "another card")
    assert refusal(prepared(tmp_path, plan=None, refused=refused, findings=[too_large])) is refused
    assert "the disk is full" in refusal(prepared(tmp_path, plan=None, refused=refused, findings=[too_large, FULL])).message


def test_run_json_has_what_never_changes(tmp_path: Path) -> None:
    launch = prepared(tmp_path)
    described = run_description.describe(launch, launch.evidence.cluster, builders.plan())
    assert (described["name"], described["recipe_file"], described["cluster_name"]) == (builders.RUN, "recipe.toml", "home")
    assert described["data"]["train"] == {"kind": "file", "sent": "on-node", "path": "/data/train.jsonl", "name": None, "sha256": "ab" * 32}
    assert described["data"]["eval"] is None
    assert described["versions"]["laptop"]["torch"] == "2.13.0+cpu" and "unsloth" not in described["versions"]["laptop"], (
        "it is not installed"
    )


def test_other_data_is_another_law(tmp_path: Path) -> None:
    launch = prepared(tmp_path)
    other = replace(launch, material=[replace(launch.material[0], sha256="cd" * 32)])
    hashes = {run_description.describe(entry, launch.evidence.cluster, builders.plan())["recipe_hash"] for entry in (launch, other)}
    assert len(hashes) == 2


def test_data_that_differs_between_nodes_has_one_digest_all_the_same(tmp_path: Path) -> None:
    """Somebody has skipped that check."""
    launch = prepared(tmp_path)
    files = {"train": {"path": "/data/train.jsonl", "found": True, "sha256": "99" * 32}}
    differing = replace(launch.evidence, facts={**launch.evidence.facts, "tower": builders.facts("tower", data=files)})
    assert run_description.digest_of(launch.material[0], differing) == "99" * 32
    assert run_description.digest_of(launch.material[0], replace(launch.evidence, facts={})) == "missing"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Nothing is sent, and nothing is started on a node; an error in the list is what the nodes answer."""
    answers: list[Any] = []

    def refuse(*_: Any) -> None:
        if answers:
            raise answers[0]

    monkeypatch.setattr(start, "ship_material", lambda *_: ["sent to all"])
    monkeypatch.setattr(start, "start", refuse)
    return answers


def launch(tmp_path: Path, announced: list[RunPaths] | None = None) -> RunPaths:
    fleet = FakeFleet(tmp_path / "nodes")
    claim = Claim(fleet, builders.RUN, "launched", lambda: 0.0)
    announce = (lambda paths: None) if announced is None else announced.append
    return start_run.start_run(
        fleet, claim, prepared(tmp_path), tmp_path / "runs", wants_supervisor=True, say=lambda text: None, announce=announce
    )


def kinds(paths: RunPaths) -> list[str]:
    return [line["event"] for line in event_log.lines(paths)]


def test_a_launch_leaves_a_folder_from_which_the_run_can_go_on(tmp_path: Path, started: list[Any]) -> None:
    announced: list[RunPaths] = []
    paths = launch(tmp_path, announced)
    assert announced == [paths]
    assert store.read_object(paths.state_json)["state"] == "running"
    assert kinds(paths) == ["launched", "note", "attempt-started"]
    assert (paths.code / "recipe.toml").read_text() == "# as a person wrote it\n"
    assert store.read_object(paths.checks_json)["skipped"] == ["gpu.memory"]
    assert store.read_object(paths.plan_json(1))["run"] == builders.RUN


@pytest.mark.parametrize(
    ("error", "state", "kind"),
    [
        (HomelabError("the port is taken", where="node laptop", hint="once more"), "failed", "start-failed"),
        (StoppedError("stopped on another machine", where="node laptop", hint="-"), "stopped", "start-stopped"),
        (KeyboardInterrupt(), "stopped", "interrupted"),
    ],
)
def test_a_start_that_fails_is_written_down(tmp_path: Path, started: list[Any], error: BaseException, state: str, kind: str) -> None:
    started.append(error)
    announced: list[RunPaths] = []
    with pytest.raises(type(error)):
        launch(tmp_path, announced)
    paths = RunPaths(tmp_path / "runs" / builders.RUN)
    assert store.read_object(paths.state_json)["state"] == state
    assert kinds(paths)[-1] == kind
    assert announced == [], "nobody is told of a run that is not under way"


class WritesUntil:
    """`os.replace`, by which each file of a run's folder gets its place, until that many are there: then `end` comes, once."""

    def __init__(self, count: int, end: Callable[[], None]) -> None:
        self.left, self._end = count, end

    def __call__(self, source: Any, target: Any) -> None:
        self.left -= 1
        if self.left == -1:
            self._end()
        REPLACE(source, target)


def raises(error: BaseException) -> Callable[[], None]:
    def end() -> None:
        raise error

    return end


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["Ctrl-C", "a full disk"])
def test_before_its_folder_is_whole_there_is_none(tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    paths = RunPaths(tmp_path / "runs" / builders.RUN)
    seen = 0
    while not paths.run_json.exists():
        monkeypatch.setattr(os, "replace", WritesUntil(seen, raises(error)))
        started[:] = [HomelabError("it comes no further", where="-", hint="-")]
        with pytest.raises((KeyboardInterrupt, HomelabError)):
            launch(tmp_path)
        store.give_back(tmp_path / "runs", builders.RUN)
        assert paths.run_json.exists() or not (tmp_path / "runs").exists(), seen
        seen += 1
    assert seen > 6 and store.read_object(paths.state_json)["state"] in ("stopped", "failed")


def test_a_launch_that_is_killed_leaves_a_whole_run_or_none(tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = set()
    for seen in range(12):
        place = tmp_path / str(seen)
        place.mkdir()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                monkeypatch.setattr(os, "replace", WritesUntil(seen, lambda: os._exit(9)))
                launch(place)
            os._exit(0)
        os.waitpid(child, 0)
        runs = store.runs_in(place / "runs")
        assert all(store.read_object(paths.plan_json(1)) and paths.commands_sh.exists() for paths in runs), seen
        outcomes.add(bool(runs))
    assert outcomes == {True, False}


def test_a_stop_by_hand_between_shipping_and_starting(tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(tmp_path / "runs" / builders.RUN)

    def stops(*_: Any) -> list[str]:
        store.set_state(paths, "stopping", 1, intent="stopping")
        return []

    monkeypatch.setattr(start, "ship_material", stops)
    started.append(AssertionError("it was started"))
    with pytest.raises(StoppedError, match="stopped by hand") as raised:
        launch(tmp_path)
    assert "--from-scratch" in raised.value.hint
    assert store.read_object(paths.state_json)["state"] == "stopped"
