"""Who loses a peer, or is stopped, has saved its last whole step: nothing is done twice, and the curve is that of a run without faults."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from homelab.shared.protocol import checkpoint_copies, waiting_mark
from homelab.worker.checkpoints import checkpoint_folder
from homelab.worker.errors import WorkerError
from homelab.worker.training import parting_save
from homelab.worker.training.parting_save import PartingSave
from tests.worker import harness

HERE = "tests.worker.training.test_parting_save"
NODES = ["tower", "laptop"]
EIGHT: dict[str, Any] = {"train__steps": 8, "train__epochs": None, "data__eval_fraction": 0.1, "tracking__eval_every_steps": 4}
FAULT = 5  # the step in whose passes, vote or change something happens

pytestmark = pytest.mark.timeout(200)


# What ranks run instead of the worker's main: the same, and at step FAULT something happens to rank 1, as their names say.


def main() -> int:
    from homelab.worker.training.train import main as worker

    return worker()


def _before(owner: Any, name: str, happens: Any, *, step: int = FAULT) -> int:
    """The worker, in which `happens(step's trainer or run)` comes before the method `name` of `owner` on rank 1, once it is in `step`."""
    real = getattr(owner, name)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        recorder = self.recorder if hasattr(self, "recorder") else self.hooks.after_pass.__self__
        if os.environ["RANK"] == "1" and recorder.step == step - 1:
            happens()
        return real(self, *args, **options)

    setattr(owner, name, method)
    return main()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _no_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("no memory for this pass")


def _own_mistake() -> None:
    raise WorkerError("the data is wrong")


def dies_in_its_passes() -> int:
    from homelab.worker.training.trainer import ShareTrainer

    return _before(ShareTrainer, "own_passes", _die)


def dies_before_it_counts() -> int:
    from homelab.worker.training.run import Run

    return _before(Run, "_before_vote", _die)


def dies_when_it_counts() -> int:
    """After the collective that makes the step count: the other one takes the step, and this one never does."""
    from homelab.worker.training.trainer import ShareTrainer

    return _before(ShareTrainer, "_clip_grad_norm", _die)


def freezes_in_an_evaluation() -> int:
    from homelab.worker.training.run import Run

    return _before(Run, "_evaluate", _freeze)


def freezes_in_its_passes() -> int:
    from homelab.worker.training.trainer import ShareTrainer

    return _before(ShareTrainer, "own_passes", _freeze)


def has_no_memory() -> int:
    from homelab.worker.training.trainer import ShareTrainer

    return _before(ShareTrainer, "own_passes", _no_memory)


def is_wrong() -> int:
    from homelab.worker.training.trainer import ShareTrainer

    return _before(ShareTrainer, "own_passes", _own_mistake)


def fails_in_the_middle_of_a_change() -> int:
    """One tensor has stepped and the next has not."""
    import torch

    real = torch.optim.AdamW.step

    def step(self: Any, *args: Any, **options: Any) -> Any:
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == FAULT:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise RuntimeError("in the middle")
        return real(self, *args, **options)

    torch.optim.AdamW.step = step
    return main()


def saves_in_the_middle_of_a_change() -> int:
    """The control: nobody says when the state is whole."""
    PartingSave.begin_change = lambda self: None
    PartingSave.end_change = lambda self: None
    return fails_in_the_middle_of_a_change()


@pytest.fixture(scope="module")
def reference(forks: harness.Forks, tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Path:
    run = harness.make_run(tmp_path_factory.mktemp("reference") / "run", model, data, **EIGHT, checkpoint__every_steps=1)
    forks.train(run, 1, [7, 5], nodes=NODES)
    return run


def _state(folder: Path, step: int) -> str:
    content = checkpoint_folder.read_manifest(folder / "checkpoints" / f"step-{step:08d}")
    assert content is not None
    return checkpoint_copies.state_digest({name: part["sha256"] for name, part in content["files"].items()})


def _run(forks: harness.Forks, folder: Path, model: Path, data: Path, entry: str, **recipe: Any) -> tuple[Path, list[int], str]:
    run = harness.make_run(folder / "run", model, data, **EIGHT, **{"checkpoint__every_steps": 100, **recipe})
    codes, output = forks.run(run, 1, [7, 5], nodes=NODES, entry=f"{HERE}:{entry}")
    return run, codes, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "step"),
    [
        ("dies_in_its_passes", 4),
        ("dies_when_it_counts", 5),
        pytest.param("dies_before_it_counts", 4, marks=pytest.mark.thorough),
        pytest.param("has_no_memory", 4, marks=pytest.mark.thorough),
    ],
)
def test_a_fault_of_one_rank_costs_no_step(
    forks: harness.Forks, tmp_path: Path, model: Path, data: Path, reference: Path, entry: str, step: int
) -> None:
    run, codes, output = _run(forks, tmp_path, model, data, entry, checkpoint__every_steps=3, checkpoint__keep=1)
    assert all(codes), output
    assert checkpoint_folder.complete_steps(run / "checkpoints") == [3, step], (
        f"the one before stays: no other node may have this one\n{output}"
    )
    assert _state(run, step) == _state(reference, step), "to the last bit"
    assert [told["step"] for told in harness.lines(run, 1, 0, "metrics.jsonl", "save")] == [3, step]
    forks.train(run, 2, [7, 5], nodes=NODES, resume_step=step)
    assert _state(run, 8) == _state(reference, 8)
    expected = harness.losses(reference, 1)
    assert harness.losses(run, 2) == {number: loss for number, loss in expected.items() if number > step}
    curve = (run / "checkpoints/step-00000008/curves.jsonl").read_text().splitlines()
    assert [line["step"] for line in map(json.loads, curve) if line["kind"] == "train"] == list(range(1, 9))
    assert [line["step"] for line in map(json.loads, curve) if line["kind"] == "eval"] == [
        0,
        4,
    ]  # the last one comes after the last checkpoint
    before, after = (harness.samples(run, attempt, 2) for attempt in (1, 2))
    assert {**{number: rows for number, rows in before.items() if number <= step}, **after} == harness.samples(reference, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [pytest.param("freezes_in_its_passes", marks=pytest.mark.thorough), "freezes_in_an_evaluation"])
def test_who_waits_for_a_frozen_peer_saves_when_it_is_stopped(
    forks: harness.Forks, tmp_path: Path, model: Path, data: Path, reference: Path, entry: str
) -> None:
    run = harness.make_run(tmp_path / "run", model, data, **EIGHT, checkpoint__every_steps=100)
    ended: list[tuple[list[int], str]] = []
    other = threading.Thread(
        target=lambda: ended.append(forks.run(run, 1, [7, 5], nodes=NODES, entry=f"{HERE}:{entry}", after_failure_s=1))
    )
    other.start()
    beats = [harness.folder_of(run, node, NODES) / f"attempts/1/ranks/{rank}/heartbeat.json" for rank, node in enumerate(NODES)]

    def pid_of(rank: int) -> int:
        return int(json.loads(beats[rank].read_text())["pid"])

    def is_frozen() -> bool:
        return beats[1].exists() and Path(f"/proc/{pid_of(1)}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"

    harness.wait_for(is_frozen, timeout_s=60)
    harness.wait_for(lambda: json.loads(beats[0].read_text())["step"] == FAULT - 1, timeout_s=30)
    os.kill(pid_of(0), signal.SIGTERM)
    other.join()
    assert ended[0][0] == [-signal.SIGTERM, -signal.SIGKILL], ended[0]
    assert _state(run, FAULT - 1) == _state(reference, FAULT - 1)


@pytest.mark.slow
def test_what_is_not_whole_or_not_a_fault_is_not_saved(
    forks: harness.Forks, tmp_path: Path, model: Path, data: Path, reference: Path
) -> None:
    for entry in ("fails_in_the_middle_of_a_change", "is_wrong"):
        run, codes, output = _run(forks, tmp_path / entry, model, data, entry)
        own = harness.folder_of(run, NODES[1], NODES)
        assert all(codes) and not checkpoint_folder.complete_steps(own / "checkpoints"), output
    run, _, output = _run(forks, tmp_path / "control", model, data, "saves_in_the_middle_of_a_change")
    (step,) = checkpoint_folder.complete_steps(run / "checkpoints")
    assert _state(run, step) != _state(reference, step), "the control: a state of no step"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", pytest.param("pipeline", marks=pytest.mark.thorough)])
def test_where_each_rank_has_a_part_nobody_saves_alone(
    forks: harness.Forks, tmp_path: Path, model: Path, data: Path, strategy: str
) -> None:
    run = harness.make_run(tmp_path / "run", model, data, **EIGHT, checkpoint__every_steps=2)
    shares, more = ([7, 5], {"strategy": "zero2"}) if strategy == "zero2" else ([12, 0], {"stages": [1, 1]})
    codes, output = forks.run(run, 1, shares, nodes=NODES, entry=f"{HERE}:dies_before_it_counts", **more)
    assert codes[1] == -signal.SIGKILL and codes[0], output
    steps = checkpoint_folder.complete_steps(run / "checkpoints")
    assert steps and all(step % 2 == 0 for step in steps)


def test_the_training_waits_for_ever_once_its_state_is_being_saved() -> None:
    saving, go_on, stepped = threading.Event(), threading.Event(), threading.Event()

    def save() -> None:
        saving.set()
        go_on.wait(20)

    parting = PartingSave(save)
    parting.begin_change()
    other = threading.Thread(target=parting.at_fault)

    def train() -> None:
        parting.begin_change()
        stepped.set()

    parting.end_change()
    other.start()
    assert saving.wait(10)
    assert Path("/proc/self/comm").read_text().strip() == waiting_mark.SAVES, "who stops the run sees it by its name"
    threading.Thread(target=train, daemon=True).start()
    go_on.set()
    other.join(10)
    assert not stepped.wait(0.5)
    assert Path("/proc/self/comm").read_text().strip() != waiting_mark.SAVES


def test_nothing_is_saved_once_the_weights_are_those_of_an_earlier_step() -> None:
    """final/ with the best weights is written from the model itself: its last step would be kept with them."""
    saved: list[int] = []
    parting = PartingSave(lambda: saved.append(1))
    parting.disarm()
    parting.at_fault()
    assert saved == []


def test_a_save_that_fails_ends_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    def save() -> None:
        raise OSError(28, "No space left on device")

    PartingSave(save).at_fault()
    assert "No space left" in capsys.readouterr().err


def test_a_state_that_is_not_whole_is_waited_for_and_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    saved, ended = list[int](), list[int]()
    monkeypatch.setattr(parting_save, "MOST_S", 0.1)
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.append(number))
    monkeypatch.setattr("ctypes.CDLL", lambda _name: type("library", (), {"signal": lambda self, number, how: None})())
    parting = PartingSave(lambda: saved.append(1))
    reading, writing = os.pipe()
    parting.begin_change()
    os.write(writing, bytes([signal.SIGINT, signal.SIGTERM]))
    parting._hear(reading)
    assert (saved, ended) == ([], [signal.SIGTERM])
    parting.end_change()
    os.write(writing, bytes([signal.SIGTERM]))
    parting._hear(reading)
    assert (saved, ended) == ([1], [signal.SIGTERM] * 2)
    os.close(reading)
    os.close(writing)
