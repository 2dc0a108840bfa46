"""A checkpoint of another cut in which a slice is missing or cut off: it is named, nobody trains on it, and the one before is gone on from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from homelab.worker.checkpoints import checkpoint_folder
from tests.worker import harness
from tests.worker.checkpoints.test_spread import renew_manifest
from tests.worker.training.test_law import TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PLACES = ["a", "b"]
STEP = "step-00000004"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: Path, forks: harness.Forks) -> Path:
    """The folder of a run of six steps on stages of 3 and 1 layers, on two nodes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    model = harness.tiny_llama(folder / "model", hidden=32, intermediate=64, layers=4)
    run = harness.make_run(folder / "run", model, data, method__kind="lora", train__steps=6, train__epochs=None)
    forks.train(run, 1, [12, 0], stages=[3, 1], nodes=PLACES)
    return folder


@pytest.fixture
def run(tmp_path: Path, undisturbed: Path) -> Path:
    """A copy of it, as it is after a fault at step 5."""
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    for node in PLACES:
        shutil.rmtree(checkpoints(tmp_path / "run", node) / "step-00000006")
        shutil.rmtree(harness.folder_of(tmp_path / "run", node, PLACES) / "final", ignore_errors=True)
    return tmp_path / "run"


def checkpoints(run: Path, node: str) -> Path:
    return harness.folder_of(run, node, PLACES) / "checkpoints"


def again(forks: harness.Forks, run: Path, attempt: int, step: int, **more: Any) -> tuple[list[int], str]:
    """Goes on at `step` with another cut."""
    return forks.run(run, attempt, [12, 0], stages=[1, 3], nodes=PLACES, resume_step=step, after_failure_s=3, **more)


def error_of(run: Path, node: str, attempt: int) -> dict[str, str]:
    return harness.error_of(harness.folder_of(run, node, PLACES), attempt, PLACES.index(node))


def assert_goes_on_from_the_one_before(forks: harness.Forks, run: Path, undisturbed: Path) -> None:
    assert not harness.losses(run, 2), "no step was trained on it"
    codes, output = again(forks, run, 3, 2)
    assert codes == [0, 0], output
    assert list(harness.losses(run, 3)) == [3, 4, 5, 6]
    assert harness.relative_error(harness.weights(run, 6), harness.weights(undisturbed / "run", 6)) < TOLERANCE


def test_a_missing_slice_is_named_on_every_node_and_the_one_before_is_taken(run: Path, undisturbed: Path, forks: harness.Forks) -> None:
    def remove_layers() -> None:
        for node in PLACES:
            file = checkpoints(run, node) / STEP / "trainable.safetensors"
            save_file({name: tensor for name, tensor in load_file(file).items() if ".layers.3." not in name}, file)
            renew_manifest(file.parent)

    codes, output = again(forks, run, 2, 4, prepare=remove_layers)
    assert all(codes) and "Traceback" not in output, output
    for node in PLACES:
        error = error_of(run, node, 2)
        assert error["message"].startswith(
            "trainable.safetensors of the checkpoint has 42 tensors, and optimizer.pt is that of 56: a part of the model is missing"
        )
        assert "complete by its manifest" in error["message"] and error["where"] == str(
            checkpoints(run, node) / f".{STEP}.corrupt/trainable.safetensors"
        )
        assert error["hint"].startswith("homelab recover run") and error["hint"].endswith("continues from the previous one, of step 2")
        assert checkpoint_folder.complete_steps(checkpoints(run, node)) == [2]
    assert_goes_on_from_the_one_before(forks, run, undisturbed)


def cut_off(run: Path, *nodes: str) -> None:
    for node in nodes:
        file = checkpoints(run, node) / STEP / "trainable.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])


def test_one_that_is_cut_off_on_a_node_comes_from_the_other(run: Path, undisturbed: Path, forks: harness.Forks) -> None:
    codes, output = again(forks, run, 2, 4, prepare=lambda: cut_off(run, "b"))
    assert codes == [0, 0], output
    notes = [line["message"] for line in harness.lines(run, 2, 1, "metrics.jsonl", "note")]
    assert any("the checkpoint of step 4 on b is set aside" in note for note in notes), notes
    assert harness.relative_error(harness.weights(run, 6), harness.weights(undisturbed / "run", 6)) < TOLERANCE


def test_one_that_is_cut_off_on_every_node_is_named(run: Path, undisturbed: Path, forks: harness.Forks) -> None:
    codes, output = again(forks, run, 2, 4, prepare=lambda: cut_off(run, *PLACES))
    assert codes == [2, 2] and "Traceback" not in output, output
    for node in PLACES:
        error = error_of(run, node, 2)
        assert (
            "bytes" in error["message"] and error["where"] == str(checkpoints(run, node) / STEP / "trainable.safetensors") and error["hint"]
        )
    assert_goes_on_from_the_one_before(forks, run, undisturbed)
