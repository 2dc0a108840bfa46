"""Written by the clock, or while the training goes on: the training and the checkpoints are the same, and no fault costs the one before."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from homelab.shared.protocol.manifest import folder_name
from homelab.worker.checkpoints import async_save, checkpoint_folder
from homelab.worker.checkpoints.async_save import Background
from homelab.worker.errors import WorkerError
from tests.worker import harness

HERE = "tests.worker.checkpoints.test_saving"

pytestmark = pytest.mark.timeout(200)


def test_what_a_thread_raises_is_raised_once_where_somebody_asks() -> None:
    one, hold, done = Background("test"), threading.Event(), []

    def fail() -> None:
        hold.wait(10)
        raise WorkerError("full")

    one.check()
    one.start(fail)
    one.check()  # still at work
    hold.set()
    with pytest.raises(WorkerError, match="full"):
        one.start(lambda: done.append(1))
    assert not done, "nothing is begun on top of a failure"
    one.wait()
    one.start(lambda: done.append(2))
    one.start(lambda: done.append(3))
    one.wait()
    assert done == [2, 3]


def test_free_memory_as_the_kernel_says_it(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree:  1 kB\nMemAvailable:   20 kB\n")
    assert async_save.available_bytes(tmp_path / "meminfo") == 20 * 1024
    assert async_save.available_bytes(tmp_path / "nothing") is None


# What ranks run instead of the worker's main: the same with one thing made slow, small or broken, as their names say.


def main() -> int:
    from homelab.worker.training.train import main as worker

    return worker()


def in_background() -> int:
    os.environ["HOMELAB_BACKGROUND_BYTES"] = "0"
    return main()


def by_the_clock() -> int:
    """Every few steps, as often as 3.5 % would be twenty times as much."""
    from homelab.shared.law import checkpoint_interval

    checkpoint_interval.LEAST_S = checkpoint_interval.FAULT_EVERY_S = 0.0
    checkpoint_interval.COST *= 20
    return in_background()


def late_writer() -> int:
    """What is copied after a step is written only when two more have changed the weights."""
    real = async_save.Saver._write

    def write(self: async_save.Saver, root: Path, step: int, *args: Any) -> None:
        if self.is_in_background and 2 < step < 8:  # the first one and the last one are waited for
            beat = self._task.rank_dir / "heartbeat.json"
            harness.wait_for(lambda: json.loads(beat.read_text())["step"] >= step + 2, timeout_s=30)
        real(self, root, step, *args)

    async_save.Saver._write = write
    return in_background()


def no_memory() -> int:
    async_save.available_bytes = lambda: 0
    return in_background()


def _at_step_four(do: Any) -> int:
    real = vars(checkpoint_folder)["sync"]

    def sync(path: Path) -> None:
        real(path)
        if ".step-00000004." in str(path) and path.name == "optimizer.pt":
            do(path)

    vars(checkpoint_folder)["sync"] = sync
    return in_background()


def stuck_writer() -> int:
    return _at_step_four(lambda path: time.sleep(3600))


def full_disk() -> int:
    def write(path: Path) -> None:
        with open("/dev/full", "w") as file:
            file.write("x" * 100_000)

    return _at_step_four(write)


def no_room_for_the_model() -> int:
    from homelab.worker.checkpoints import weights

    real = weights.write_final

    def write(*args: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        real(*args)

    weights.write_final = write
    return main()


EIGHT: dict[str, Any] = {"train__steps": 8, "train__epochs": None, "checkpoint__every_steps": 2}


@pytest.mark.slow
def test_an_interval_by_the_clock_changes_nothing(forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    recipe: dict[str, Any] = {"train__steps": 10, "train__epochs": None, "data__eval_fraction": 0.1, "tracking__eval_every_steps": 4}
    fixed = harness.make_run(tmp_path / "fixed", model, data, **recipe, checkpoint__every_steps=3)
    clock = harness.make_run(tmp_path / "clock", model, data, **recipe, checkpoint__every_steps=None)
    for run, entry in ((fixed, "main"), (clock, "by_the_clock")):
        codes, output = forks.run(run, 1, [7, 5], entry=f"{HERE}:{entry}")
        assert codes == [0, 0], output
    saved = [[line["step"] for line in harness.lines(run, 1, 0, "metrics.jsonl", "save")] for run in (fixed, clock)]
    assert saved[0] == checkpoint_folder.complete_steps(fixed / "checkpoints") == [3, 6, 9, 10]
    assert saved[1] == checkpoint_folder.complete_steps(clock / "checkpoints")
    assert saved[1][0] == 1 and saved[1][-1] == 10 and len(saved[1]) > 2
    assert harness.losses(clock, 1) == harness.losses(fixed, 1)
    assert harness.samples(clock, 1, 2) == harness.samples(fixed, 1, 2)
    evals = [[(line["step"], line["eval_loss"]) for line in harness.lines(run, 1, 0, "metrics.jsonl", "eval")] for run in (fixed, clock)]
    assert evals[0] == evals[1] and len(evals[0]) == 4
    assert harness.relative_error(harness.weights(clock, 10), harness.weights(fixed, 10)) == 0


@pytest.mark.slow
def test_what_is_written_later_is_what_was_there_when_it_was_saved(forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    runs = {name: harness.make_run(tmp_path / name, model, data, **EIGHT) for name in ("no_memory", "late_writer")}
    for name, run in runs.items():
        codes, output = forks.run(run, 1, [7, 5], entry=f"{HERE}:{name}")
        assert codes == [0, 0], output
        told = harness.lines(run, 1, 0, "metrics.jsonl", "save")
        assert [line["step"] for line in told] == [2, 4, 6, 8] and {line["in_background"] for line in told} == {name == "late_writer"}
        notes = [line["message"] for line in harness.lines(run, 1, 0, "metrics.jsonl", "note")]
        assert any("free memory" in note for note in notes) == (name == "no_memory")
    waiting, background = runs.values()
    manifests = [{step: state(run, step) for step in (2, 4, 6, 8)} for run in runs.values()]
    for step in (2, 4, 6, 8):
        assert manifests[0][step] == manifests[1][step], "to the last bit, the optimizer too"
    forks.train(background, 2, [7, 5], resume_step=4)
    expected = harness.losses(waiting, 1)
    assert harness.losses(background, 2) == {step: expected[step] for step in (5, 6, 7, 8)}
    assert manifest(background, 8)["attempt"] == 2 and state(background, 8) == manifests[0][8]


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written_the_one_before_is_whole(
    forks: harness.Forks, tmp_path: Path, model: Path, data: Path
) -> None:
    run = harness.make_run(tmp_path / "run", model, data, **EIGHT | {"checkpoint__keep": 1})
    beat, ended = run / "attempts/1/ranks/0/heartbeat.json", []
    other = threading.Thread(target=lambda: ended.append(forks.run(run, 1, [12], entry=f"{HERE}:stuck_writer")))
    other.start()

    def waits_for_the_next_save() -> bool:
        seen = json.loads(beat.read_text()) if beat.exists() else {}
        return (seen.get("step"), seen.get("phase")) == (6, "saving")

    harness.wait_for(waits_for_the_next_save, timeout_s=60)
    assert list((run / "checkpoints").glob(".step-00000004.*.partial/optimizer.pt")), "in the middle, two steps later"
    os.kill(json.loads(beat.read_text())["pid"], signal.SIGKILL)
    other.join()
    assert ended[0][0] == [-signal.SIGKILL]
    assert checkpoint_folder.complete_steps(run / "checkpoints") == [2], "the only good one is kept until there is another"
    checkpoint_folder.verify(run / "checkpoints/step-00000002", json.loads((run / "run.json").read_text())["recipe_hash"])
    forks.train(run, 2, [12], resume_step=2)
    assert [entry.name for entry in (run / "checkpoints").iterdir()] == ["step-00000008"], "and nothing is left of the half one"


@pytest.mark.slow
def test_a_disk_that_is_full_in_the_background_ends_the_run_at_the_next_step(
    forks: harness.Forks, tmp_path: Path, model: Path, data: Path
) -> None:
    run = harness.make_run(tmp_path / "run", model, data, **EIGHT)
    codes, output = forks.run(run, 1, [12], entry=f"{HERE}:full_disk")
    assert codes == [2] and "Traceback" not in output
    error = harness.error_of(run, 1)
    assert error["message"] == "the checkpoint of step 4 cannot be written: No space left on device" and "make room" in error["hint"]
    assert max(harness.losses(run, 1)) in (5, 6), "at the next step, at the latest when the next checkpoint is due"
    assert [entry.name for entry in (run / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.slow
def test_no_room_for_the_final_model_is_said_and_nothing_is_trained_again(
    forks: harness.Forks, tmp_path: Path, model: Path, data: Path
) -> None:
    run = harness.make_run(tmp_path / "run", model, data, **EIGHT)
    codes, output = forks.run(run, 1, [12], entry=f"{HERE}:no_room_for_the_model")
    assert codes == [2] and "Traceback" not in output
    error = harness.error_of(run, 1)
    assert error["message"] == "the final model cannot be written: File too large" and error["where"].endswith("/final")
    assert not list(run.glob("*final*")) + list(run.glob(".final*"))
    forks.train(run, 2, [12], resume_step=8)
    assert harness.losses(run, 2) == {} and (run / "final/README.md").exists()


def manifest(run: Path, step: int) -> dict[str, Any]:
    found = checkpoint_folder.read_manifest(run / "checkpoints" / folder_name(step))
    assert found is not None, step
    return found


def state(run: Path, step: int) -> dict[str, Any]:
    """Its files but the curves, which have the time in them."""
    return {name: facts for name, facts in manifest(run, step)["files"].items() if name != "curves.jsonl"}
