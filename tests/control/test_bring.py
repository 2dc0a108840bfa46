"""The checkpoint to go on from: chosen among what the nodes hold whole, and sent through here only when no node of the plan has it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from homelab.control import find, recover
from homelab.errors import HomelabError
from homelab.node import files, paths, transfer
from homelab.remote.fanout import Fleet
from homelab.runs.paths import RunPaths
from tests.checks import healthy
from tests.node.test_transfer import BODY, RUN, checkpoint

pytestmark = pytest.mark.timeout(30)


class Agent:
    """A node's own code without a wire: what it was asked stands in `asked`."""

    def __init__(self, workdir: Path, asked: list[str]) -> None:
        self.workdir, self.asked = workdir, asked

    def fetch(self, verb: str, request: dict[str, Any], into: BinaryIO, *, timeout_s: float) -> None:
        self.asked.append(f"{verb} {self.workdir.name}")
        transfer.send_checkpoint({"workdir": str(self.workdir), **request}, into)

    def send(self, verb: str, request: dict[str, Any], body: BinaryIO, *, timeout_s: float) -> dict[str, Any]:
        self.asked.append(f"{verb} {self.workdir.name}")
        return transfer.receive_checkpoint({"workdir": str(self.workdir), **request}, body)


class Nodes:
    """Stands for a fleet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[str] = []

    def agent(self, name: str) -> Agent:
        return Agent(self.root / name, self.asked)

    def ask(self, verb: str, request: dict[str, Any], *, names: Iterable[str], timeout_s: float) -> Any:
        assert verb == "checkpoints"
        return {name: transfer.checkpoints({"workdir": str(self.root / name), **request}) for name in names}, {}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """The run's folder on the controller."""
    folder = tmp_path / "here" / RUN
    folder.mkdir(parents=True)
    monkeypatch.setattr(find, "recipe_of", lambda paths: ({}, healthy.recipe()))
    return RunPaths(folder)


def newest(nodes: Nodes, run: RunPaths) -> tuple[int, list[str], tuple[str, ...]]:
    return recover._newest_checkpoint(
        cast(Fleet, nodes), run, ["a", "b", "c"], silent=(), from_scratch="never", say=lambda text: None
    )


def bring(nodes: Nodes, run: RunPaths, holders: list[str], names: list[str]) -> None:
    halted = recover.Halted(names, {}, 20, holders)
    recover._bring_checkpoint(cast(Fleet, nodes), run, halted, names, lambda text: None)


def test_the_newest_that_is_whole_anywhere_is_chosen_and_what_was_bad_is_named(tmp_path: Path, run: RunPaths) -> None:
    for name, steps in {"a": (10, 20), "b": (10, 20), "c": (10,)}.items():
        for step in steps:
            checkpoint(tmp_path / name, step)
    flipped = BODY[:-1] + bytes([BODY[-1] ^ 1])
    (Path(files.checkpoint_dir(paths.run_dir(str(tmp_path / "a"), RUN), 20)) / "weights").write_bytes(flipped)
    why = "checkpoint 20 on a is not used: weights has another content than when it was saved"
    assert newest(Nodes(tmp_path), run) == (20, ["b"], (why,))
    events = [json.loads(line) for line in run.events_jsonl.read_text().splitlines()]
    assert len(events) == 1 and "checkpoint 20 on a is not used" in json.dumps(events[0])


def test_with_none_that_is_whole_a_person_decides(tmp_path: Path, run: RunPaths) -> None:
    (checkpoint(tmp_path / "a", 10) / "weights").write_bytes(b"bad")
    with pytest.raises(HomelabError, match="no complete checkpoint") as caught:
        newest(Nodes(tmp_path), run)
    assert "--from-scratch" in (caught.value.hint or "")


def test_nothing_goes_through_here_while_one_node_of_the_plan_has_it(tmp_path: Path, run: RunPaths) -> None:
    checkpoint(tmp_path / "b", 20)
    nodes = Nodes(tmp_path)
    bring(nodes, run, ["b"], ["a", "b", "c"])
    assert nodes.asked == []


def test_from_a_node_outside_of_the_plan_it_is_brought_to_the_head_alone(tmp_path: Path, run: RunPaths) -> None:
    checkpoint(tmp_path / "c", 20)
    nodes = Nodes(tmp_path)
    bring(nodes, run, ["c"], ["a", "b"])
    assert nodes.asked == ["send-checkpoint c", "receive-checkpoint a"]
    assert transfer.verify_checkpoint({"workdir": str(tmp_path / "a"), "run": RUN, "step": 20})["fault"] is None
    assert list(run.root.iterdir()) == [], "the copy that went through here is gone"


def test_a_script_finds_it_on_every_node(tmp_path: Path, run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    from homelab.config.recipe import Recipe

    script = Recipe.model_validate({"script": {"path": "train.py"}})
    monkeypatch.setattr(find, "recipe_of", lambda paths: ({}, script))
    checkpoint(tmp_path / "b", 20)
    nodes = Nodes(tmp_path)
    bring(nodes, run, ["b"], ["a", "b", "c"])
    assert sorted(nodes.asked) == ["receive-checkpoint a", "receive-checkpoint c", "send-checkpoint b"]
