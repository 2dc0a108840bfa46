"""A node that lacks the checkpoint, or holds a damaged one, has it from a peer before the first step; whole, or not at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import namedtuple
from pathlib import Path
from typing import Any, cast

import pytest

from homelab.shared.protocol.digest import file_sha256
from homelab.shared.protocol.manifest import MANIFEST
from homelab.worker.checkpoints import checkpoint_folder
from tests.worker import harness
from tests.worker.training.test_law import TOLERANCE

pytestmark = pytest.mark.timeout(200)

# Two ranks on one node: the second has no part in the sending, and waits.
PLACES = ["damaged", "without", "without", "whole"]
SHARES = [5, 3, 2, 2]
STEP = "step-00000002"
_Usage = namedtuple("_Usage", "total used free")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path, forks: harness.Forks) -> Path:
    """The folder of a run of four steps that nothing happened to: checkpoints 2 and 4 on all three nodes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = harness.make_run(folder / "run", model, data, train__steps=4, train__epochs=None)
    forks.train(run, 1, SHARES, nodes=PLACES)
    return folder


@pytest.fixture
def run(tmp_path: Path, undisturbed: Path) -> Path:
    """A copy of it, on the disks of all nodes."""
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def checkpoints(run: Path, node: str) -> Path:
    return harness.folder_of(run, node, PLACES) / "checkpoints"


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def damage(run: Path) -> None:
    """As it is after a fault at step 3: only one node of three holds checkpoint 2 whole."""
    for node in dict.fromkeys(PLACES):
        shutil.rmtree(checkpoints(run, node) / "step-00000004", ignore_errors=True)
    shutil.rmtree(checkpoints(run, "without"))
    weights = checkpoints(run, "damaged") / STEP / "trainable.safetensors"
    flipped = bytearray(weights.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    weights.write_bytes(flipped)


class Spiteful:
    """What a pickle can do to who loads it."""

    def __reduce__(self) -> Any:
        return (print, ("it was called",))


def renew_manifest(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"] = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)} for name in manifest["files"]
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))


def again(forks: harness.Forks, run: Path, attempt: int, **more: Any) -> tuple[list[int], str]:
    # Ranks that wait at the store for one that has ended are ended by whoever watches the run: here soon.
    more = {"prepare": lambda: damage(run), "after_failure_s": 3, "resume_step": 2, **more}
    return forks.run(run, attempt, SHARES, nodes=PLACES, **more)


def error_of(run: Path, node: str, attempt: int, rank: int) -> dict[str, str]:
    return harness.error_of(harness.folder_of(run, node, PLACES), attempt, rank)


def test_those_without_and_with_a_flipped_bit_have_it_from_the_one_that_is_whole(run: Path, forks: harness.Forks) -> None:
    undisturbed = harness.weights(run, 4)
    codes, output = again(forks, run, 2)
    assert codes == [0] * 4, output
    sent = content(checkpoints(run, "whole") / STEP)
    for node in dict.fromkeys(PLACES):
        assert content(checkpoints(run, node) / STEP) == sent, node
        assert checkpoint_folder.complete_steps(checkpoints(run, node)) == [2, 4]
    assert harness.relative_error(harness.weights(run, 4), undisturbed) < TOLERANCE
    assert min(harness.losses(run, 2)) == 3, "no step is repeated"
    evidence = [path.name for path in checkpoints(run, "damaged").iterdir() if not path.name.startswith("step-")]
    assert evidence == [f".{STEP}.corrupt"] and content(checkpoints(run, "damaged") / evidence[0]) != sent
    notes = [line["message"] for rank in (0, 3) for line in harness.lines(run, 2, rank, "metrics.jsonl", "note")]
    assert any("set aside" in note and "sha256" in note for note in notes)
    assert any("went from whole to damaged, without" in note for note in notes)


@pytest.mark.thorough
def test_who_has_no_part_in_the_sending_does_not_wait_at_the_cards_group(run: Path, forks: harness.Forks) -> None:
    codes, output = again(forks, run, 2, entry="tests.worker.checkpoints.test_spread:beside_cards")
    assert codes == [0] * 4, output
    assert content(checkpoints(run, "damaged") / STEP) == content(checkpoints(run, "whole") / STEP)


def test_a_whole_copy_with_other_weights_is_replaced_by_what_most_hold(run: Path, forks: harness.Forks) -> None:
    undisturbed = harness.weights(run, 4)
    odd = checkpoints(run, "damaged")  # the head's own: it has no vote more than the others

    def alter() -> None:
        for file in ("trainable.safetensors", "optimizer.pt"):
            shutil.copy(odd / "step-00000004" / file, odd / STEP / file)
        renew_manifest(odd / STEP)
        for node in dict.fromkeys(PLACES):
            shutil.rmtree(checkpoints(run, node) / "step-00000004")

    codes, output = again(forks, run, 2, prepare=alter)
    assert codes == [0] * 4, output
    assert harness.relative_error(harness.weights(run, 4), undisturbed) < TOLERANCE
    copies = {content(checkpoints(run, node) / "step-00000004")["optimizer.pt"] for node in dict.fromkeys(PLACES)}
    assert len(copies) == 1
    notes = [line["message"] for rank in range(4) for line in harness.lines(run, 2, rank, "metrics.jsonl", "note")]
    assert any("on damaged is set aside" in note and "differ from those of whole, without" in note for note in notes), notes


@pytest.mark.thorough
def test_what_was_chosen_before_the_start_counts_more_than_the_votes_of_those_that_take_part(run: Path, forks: harness.Forks) -> None:
    from homelab.worker.checkpoints import broadcast

    undisturbed = harness.weights(run, 4)
    chosen = broadcast._digest(checkpoints(run, "whole") / STEP)

    def alter() -> None:
        for node in ("damaged", "without"):
            for file in ("trainable.safetensors", "optimizer.pt"):
                shutil.copy(checkpoints(run, node) / "step-00000004" / file, checkpoints(run, node) / STEP / file)
            renew_manifest(checkpoints(run, node) / STEP)
        for node in dict.fromkeys(PLACES):
            plan = harness.folder_of(run, node, PLACES) / "attempts/2/plan.json"
            plan.write_text(json.dumps(json.loads(plan.read_text()) | {"resume_digest": chosen}))

    codes, output = again(forks, run, 2, prepare=alter)
    assert codes == [0] * 4, output
    assert harness.relative_error(harness.weights(run, 4), undisturbed) < TOLERANCE


def test_one_that_torch_refuses_to_load_is_said_and_not_taken_again(run: Path, forks: harness.Forks) -> None:
    def spoil() -> None:
        import torch

        for node in dict.fromkeys(PLACES):
            folder = checkpoints(run, node) / "step-00000004"
            torch.save({"state": Spiteful(), "param_groups": []}, folder / "optimizer.pt")
            renew_manifest(folder)

    codes, output = again(forks, run, 2, prepare=spoil, resume_step=4)
    assert all(codes) and "Traceback" not in output and "it was called" not in output, output
    for node, rank in (("damaged", 0), ("without", 1), ("whole", 3)):
        error = error_of(run, node, 2, rank)
        assert error["message"].startswith("optimizer.pt of the checkpoint cannot be loaded: ") and "set aside" in error["message"]
        assert error["where"] == str(checkpoints(run, node) / ".step-00000004.corrupt/optimizer.pt")
        assert error["hint"].startswith("homelab recover run") and error["hint"].endswith("continues from the previous one, of step 2")
        assert checkpoint_folder.complete_steps(checkpoints(run, node)) == [2]
    codes, output = again(forks, run, 3, prepare=lambda: None)
    assert codes == [0] * 4, output


def test_where_nobody_holds_it_every_node_says_what_is_wrong_with_its_own(run: Path, forks: harness.Forks) -> None:
    def damage_all() -> None:
        damage(run)
        (checkpoints(run, "whole") / STEP / "optimizer.pt").write_bytes(b"cut short")

    codes, output = again(forks, run, 2, prepare=damage_all)
    assert codes == [2] * 4 and "Traceback" not in output
    assert "sha256" in error_of(run, "damaged", 2, 0)["message"]
    assert "no node of this attempt" in error_of(run, "without", 2, 2)["message"]
    assert "9 bytes" in error_of(run, "whole", 2, 3)["message"]


def test_a_disk_without_room_ends_the_attempt_before_anything_is_sent(run: Path, forks: harness.Forks) -> None:
    codes, output = again(forks, run, 2, entry="tests.worker.checkpoints.test_spread:without_room")
    assert codes[1] == 2 and all(codes), output
    error = error_of(run, "without", 2, 1)
    assert "checkpoint of step 2" in error["message"] and "No space left" in error["message"] and "1000 bytes are free" in error["message"]
    assert error["where"] == str(checkpoints(run, "without")) and "df -h" in error["hint"]
    assert list(checkpoints(run, "without").iterdir()) == []


def test_killed_in_the_middle_of_receiving_leaves_nothing_under_the_final_name(run: Path, forks: harness.Forks) -> None:
    undisturbed = harness.weights(run, 4)
    codes, output = again(forks, run, 2, entry="tests.worker.checkpoints.test_spread:killed_in_the_middle")
    assert codes[1] == -signal.SIGKILL and all(codes), output
    left = list(checkpoints(run, "without").iterdir())
    assert [path.suffix for path in left] == [".partial"] and not (left[0] / MANIFEST).exists()
    assert any(path.stat().st_size for path in left[0].iterdir()), "it was in the middle of it"
    codes, output = again(forks, run, 3)
    assert codes == [0] * 4, output
    assert harness.relative_error(harness.weights(run, 4), undisturbed) < TOLERANCE
    assert [path.name for path in checkpoints(run, "without").glob(".*")] == []


def test_what_arrives_damaged_is_not_taken(run: Path, forks: harness.Forks) -> None:
    codes, output = again(forks, run, 2, entry="tests.worker.checkpoints.test_spread:damaged_on_the_way")
    assert codes[1] == 1 and all(codes), output
    assert "arrived damaged from whole" in error_of(run, "without", 2, 1)["message"]
    assert list(checkpoints(run, "without").iterdir()) == []


@pytest.mark.thorough
def test_an_attempt_that_was_replaced_saves_nothing_more(run: Path, forks: harness.Forks) -> None:
    replaced = harness.folder_of(run, "whole", PLACES) / "attempts" / "5"
    codes, output = again(forks, run, 2, prepare=lambda: (damage(run), replaced.mkdir(), (replaced / "plan.json").touch()))
    assert codes[3] == 2 and all(codes), output
    assert "attempt 5 has replaced this one" in error_of(run, "whole", 2, 3)["message"]
    assert [path.name for path in checkpoints(run, "whole").iterdir()] == [STEP]


# What the ranks of some tests run instead of the worker's `main`: the same with one thing that goes wrong.


def worker() -> int:
    from homelab.worker.checkpoints import broadcast
    from homelab.worker.training.train import main

    broadcast.CHUNK_BYTES = 4096
    return main()


def is_without() -> bool:
    return os.environ["HOMELAB_NODE"] == "without"


def without_room() -> int:
    if is_without():
        shutil.disk_usage = lambda path: cast(Any, _Usage(10**9, 10**9 - 1000, 1000))
    return worker()


def killed_in_the_middle() -> int:
    from homelab.worker.checkpoints import broadcast

    write, seen = broadcast._Arriving.write, [0]

    def die(self: Any, chunk: Any) -> None:
        write(self, chunk)
        seen[0] += 1
        if seen[0] == 20:
            os.kill(os.getpid(), signal.SIGKILL)

    if is_without():
        broadcast._Arriving.write = die
    return worker()


def damaged_on_the_way() -> int:
    from homelab.worker.checkpoints import broadcast

    write = broadcast._Arriving.write

    def flip(self: Any, chunk: Any) -> None:
        chunk[0] ^= 1
        write(self, chunk)

    if is_without():
        broadcast._Arriving.write = flip
    return worker()


def beside_cards() -> int:
    """The ranks' group is bound to a card, as NCCL's is (`device_id`): who is in no new group would split it, and wait for the others."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    class Bound:
        def perform_nocolor_split(self, device: torch.device) -> None:
            raise RuntimeError(f"rank {dist.get_rank()} splits the group of {device}, and the members of the new one never come")

    make = dist.new_group

    def bound(*arguments: Any, **options: Any) -> Any:
        everybody = distributed_c10d._get_default_group()
        everybody.bound_device_id = torch.device("cuda", 0)
        try:
            return make(*arguments, **options)
        finally:
            everybody.bound_device_id = None

    distributed_c10d._get_split_source = lambda group: Bound()
    dist.new_group = bound
    return worker()
