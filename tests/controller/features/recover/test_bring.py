"""The checkpoint to go on from: chosen among what the nodes hold whole, and sent through here only when no node of the plan has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.controller.features.recover import checkpoint_transfer, halt
from homelab.controller.features.recover.replicas import ResumePoint
from homelab.controller.run.paths import RunPaths
from homelab.node import paths
from homelab.shared.protocol import manifest
from tests.fakes import FakeFleet
from tests.node.storage.test_transfer import BODY, RUN, checkpoint

pytestmark = pytest.mark.timeout(30)


NAMES = ["a", "b", "c"]
MOVES = ("send-checkpoint", "receive-checkpoint")


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """The run's folder on the controller."""
    folder = tmp_path / "here" / RUN
    folder.mkdir(parents=True)
    return RunPaths(folder)


def newest(nodes: FakeFleet, run: RunPaths) -> ResumePoint:
    return halt.newest_checkpoint(nodes, run, NAMES, silent={}, from_scratch="never", say=lambda text: None)


def bring(nodes: FakeFleet, run: RunPaths, holders: list[str], names: list[str], *, to_all: bool = False) -> None:
    checkpoint_transfer.bring(nodes, run, ResumePoint(20, holders), names, lambda text: None, to_all=to_all)


def test_the_newest_that_is_whole_anywhere_is_chosen_and_what_was_bad_is_named(tmp_path: Path, run: RunPaths) -> None:
    for name, steps in {"a": (10, 20), "b": (10, 20), "c": (10,)}.items():
        for step in steps:
            checkpoint(tmp_path / name, step)
    flipped = BODY[:-1] + bytes([BODY[-1] ^ 1])
    (Path(manifest.folder_of(paths.run_dir(str(tmp_path / "a"), RUN), 20)) / "weights").write_bytes(flipped)
    why = "checkpoint 20 on a is not used: weights has changed since it was saved"
    assert newest(FakeFleet(tmp_path, NAMES), run) == ResumePoint(20, ["b"], notes=(why,))
    events = [json.loads(line) for line in run.events_jsonl.read_text().splitlines()]
    assert len(events) == 1 and "checkpoint 20 on a is not used" in json.dumps(events[0])


def test_with_none_that_is_whole_a_person_decides(tmp_path: Path, run: RunPaths) -> None:
    (checkpoint(tmp_path / "a", 10) / "weights").write_bytes(b"bad")
    with pytest.raises(HomelabError, match="no complete checkpoint") as caught:
        newest(FakeFleet(tmp_path, NAMES), run)
    assert "--from-scratch" in (caught.value.hint or "")


def test_what_was_begun_again_goes_on_from_its_own(tmp_path: Path, run: RunPaths) -> None:
    """Also on the node that has no part in it, and which may come back."""
    for name in NAMES:
        checkpoint(tmp_path / name, 500)
    nodes = FakeFleet(tmp_path, NAMES)

    def again(names: list[str], **silent: str) -> ResumePoint:
        return halt.newest_checkpoint(nodes, run, names, silent=silent, from_scratch="always", say=lambda text: None)

    note = "c may still have checkpoints, from which a recovery with it goes on"
    assert again(["a", "b"], c="no route to host") == ResumePoint(0, [], notes=(note,))
    checkpoint(tmp_path / "a", 60)
    assert halt.newest_checkpoint(nodes, run, ["a", "b"], silent={}, from_scratch="never", say=lambda text: None).step == 60
    assert newest(nodes, run).step == 500
    nodes.answer("checkpoints", HomelabError("the disk is read-only", where="node b", hint="-"), ["b"])
    with pytest.raises(HomelabError, match="the disk is read-only"):
        again(NAMES)


def test_nothing_goes_through_here_while_one_node_of_the_plan_has_it(tmp_path: Path, run: RunPaths) -> None:
    checkpoint(tmp_path / "b", 20)
    nodes = FakeFleet(tmp_path, NAMES)
    bring(nodes, run, ["b"], ["a", "b", "c"])
    assert nodes.verbs(*MOVES) == []


def test_from_a_node_outside_of_the_plan_it_is_brought_to_the_head_alone(tmp_path: Path, run: RunPaths) -> None:
    checkpoint(tmp_path / "c", 20)
    nodes = FakeFleet(tmp_path, NAMES)
    bring(nodes, run, ["c"], ["a", "b"])
    assert nodes.asked == [("c", "send-checkpoint"), ("a", "receive-checkpoint")]
    assert manifest.fault(manifest.folder_of(tmp_path / "a" / "runs" / RUN, 20)) is None
    assert list(run.root.iterdir()) == [], "the copy that went through here is gone"


def test_a_script_finds_it_on_every_node(tmp_path: Path, run: RunPaths) -> None:
    checkpoint(tmp_path / "b", 20)
    nodes = FakeFleet(tmp_path, NAMES)
    bring(nodes, run, ["b"], ["a", "b", "c"], to_all=True)
    assert nodes.verbs("send-checkpoint") == ["b"]
    assert sorted(nodes.verbs("receive-checkpoint")) == ["a", "c"]


def sharded(root: Path, step: int, held: list[int], of: int = 3) -> None:
    """A checkpoint of which this node has these shards."""
    place = checkpoint(root, step) / manifest.MANIFEST
    place.write_text(json.dumps(json.loads(place.read_text()) | {"shards": {"of": of, "held": held}}))


def newest_sharded(nodes: FakeFleet, run: RunPaths, *, layout: str = "sharded", **more: Any) -> ResumePoint:
    return halt.newest_checkpoint(
        nodes, run, NAMES, **{"silent": {}, "from_scratch": "never", "say": lambda text: None, "layout": layout, **more}
    )


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_shards_are_gone_on_from_where_all_of_them_are_there(tmp_path: Path, run: RunPaths, layout: str) -> None:
    for name, held in {"a": [0], "b": [1, 0], "c": [2]}.items():
        sharded(tmp_path / name, 20, held)
    for name, held in {"a": [0], "c": [2]}.items():
        sharded(tmp_path / name, 30, held)
    found = newest_sharded(FakeFleet(tmp_path, NAMES), run, layout=layout)
    assert (found.step, found.holders) == (20, NAMES)
    assert found.notes == ("checkpoint 30 is not used: no node that answers has shard 1",)
    assert found.held["b"].parts == {0, 1}


def test_a_run_in_shards_does_not_begin_again_while_somebody_silent_may_have_the_others(tmp_path: Path, run: RunPaths) -> None:
    sharded(tmp_path / "a", 20, [0])
    nodes = FakeFleet(tmp_path, NAMES)
    nodes.nodes["c"].is_off = True
    with pytest.raises(HomelabError, match="no checkpoint has all its shards") as caught:
        newest_sharded(nodes, run, from_scratch="if-nothing-was-saved")
    assert "no node that answers has shards 1, 2 (c may have them, and does not answer)" in str(caught.value.where)
    assert "bring c back" in str(caught.value.hint)
    assert manifest.steps(paths.run_dir(str(tmp_path / "a"), RUN)) == [20]


def test_a_node_with_the_only_copy_of_a_shard_is_not_left_out(tmp_path: Path, run: RunPaths) -> None:
    for name, held in {"a": [0, 2], "b": [1, 0], "c": [2]}.items():
        sharded(tmp_path / name, 20, held)
    nodes = FakeFleet(tmp_path, NAMES)
    found = newest_sharded(nodes, run)

    def go_on(names: list[str]) -> None:
        checkpoint_transfer.bring(nodes, run, found, names, lambda text: None, to_all=False)

    go_on(["a", "b"])
    with pytest.raises(HomelabError, match="b cannot be left out: no node of the plan has shard 1 of checkpoint 20"):
        go_on(["a", "c"])
    assert nodes.verbs(*MOVES) == []
