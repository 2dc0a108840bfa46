"""Some steps under torch.profiler: what the profile names, that it changes nothing, and that nothing of it is there unless it is asked for."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

RECIPE: dict[str, Any] = {"train__steps": 6, "train__epochs": None, "checkpoint__every_steps": 100, "parallel__micro_batch": 2}
HERE = "tests.worker.profiling.test_profile"


def asked(run: Path, first: int = 4, last: int = 5, ranks: tuple[int, ...] = (0, 1)) -> Path:
    """The run with steps to profile."""
    described = json.loads((run / "run.json").read_text())
    described["profile"] = {"first_step": first, "last_step": last, "ranks": list(ranks)}
    (run / "run.json").write_text(json.dumps(described))
    return run


def profile_of(run: Path, rank: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """(summary, trace) of a rank."""
    folder = run / "profiles" / f"rank-{rank}"
    with gzip.open(folder / "rank.pt.trace.json.gz", "rt", encoding="utf-8") as stream:
        return json.loads((folder / "profile.json").read_text()), json.load(stream)


def notes(run: Path, attempt: int = 1, rank: int = 0) -> list[str]:
    return [line["message"] for line in harness.lines(run, attempt, rank, "metrics.jsonl", "note")]


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.thorough), "zero2"])
def test_a_profile_of_two_ranks(strategy: str, forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    plain = harness.make_run(tmp_path / "plain", model, data, **RECIPE)
    forks.train(plain, 1, [7, 5], strategy=strategy)
    run = asked(harness.make_run(tmp_path / "run", model, data, **RECIPE))
    forks.train(run, 1, [7, 5], strategy=strategy)
    assert harness.losses(run, 1) == harness.losses(plain, 1), "to the last bit"
    for rank in (0, 1):
        summary, trace = profile_of(run, rank)
        lines = {line["step"]: line for line in harness.lines(run, 1, rank, "metrics.jsonl", "train")}
        assert summary["steps"] == [4, 5] and summary["step_s"] == [lines[step]["step_s"] for step in (4, 5)]
        names = {event["name"] for event in trace["traceEvents"]}
        assert {"input", "forward", "backward", "reduction", "optimizer", "ProfilerStep#4", "ProfilerStep#5"} <= names
        assert all(summary["phases"][phase] > 0 for phase in ("input", "forward", "backward", "reduction", "optimizer"))
        # of tiny steps, beside other tests
        assert sum(summary["phases"].values()) == pytest.approx(sum(summary["step_s"]), rel=0.1, abs=0.2)
        exchanged = [row for row in summary["exchanges"] if row["name"] != "figures of the step"]
        assert sum(row["payload_bytes"] for row in exchanged) == sum(lines[step]["sent_bytes"] for step in (4, 5))
        assert summary["memory"]["peak_bytes"] > 0 and summary["memory"]["points"]
    assert not list(run.glob("profiles/.*")), "nothing half is left"


@pytest.mark.parametrize(
    ("fault", "operator"), [pytest.param("asleep", "Python of LlamaMLP", marks=pytest.mark.thorough), ("sorting", "aten::sort")]
)
def test_a_slowdown_put_in_on_purpose_is_named(
    fault: str, operator: str, forks: harness.Forks, tmp_path: Path, model: Path, data: Path
) -> None:
    run = asked(harness.make_run(tmp_path / "run", model, data, **RECIPE))
    codes, output = forks.run(run, 1, [12], entry=f"{HERE}:{fault}")
    assert codes == [0], output
    dearest = profile_of(run)[0]["operators"][0]
    assert (dearest["name"], dearest["places"][0]["module"]) == (operator, "model.layers.1.mlp")
    assert dearest["places"][0]["class"] == "LlamaMLP" and dearest["places"][0]["source"].startswith("test_profile.py:")
    assert dearest["places"][0]["share"] > 0.9 and dearest["share"] > 0.1


def asleep() -> int:
    """A worker in whose model one module sleeps in every forward pass."""
    return _slowed(lambda: time.sleep(0.05))


def sorting() -> int:
    """A worker in whose model one module sorts a million numbers in every forward pass."""
    import torch

    return _slowed(lambda: torch.sort(torch.arange(1_000_000) % 1009))


def _slowed(act: Any) -> int:
    from transformers.models.llama import modeling_llama

    from homelab.worker.training.train import main

    built = modeling_llama.LlamaMLP.__init__
    made: list[Any] = []

    def slow_second(self: Any, config: Any) -> None:
        built(self, config)
        made.append(self)
        if len(made) == 2:
            usual = self.forward

            def forward(x: Any) -> Any:
                act()
                return usual(x)

            self.forward = forward

    modeling_llama.LlamaMLP.__init__ = slow_second
    return main()


def test_without_being_asked_nothing_of_it_is_there(forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    run = harness.make_run(tmp_path / "run", model, data, **RECIPE)
    codes, output = forks.run(run, 1, [7, 5], entry=f"{HERE}:watched")
    assert codes == [0, 0], output
    assert not (run / "profiles").exists()


def watched() -> int:
    """A worker that fails where anything of a profile is imported, installed, or called by torch."""
    from torch.autograd import profiler

    from homelab.worker.training import trainer
    from homelab.worker.training.train import main

    usual = trainer.ShareTrainer.training_step
    classes = ("get_batch_samples", "step_done", "compute_loss", "_clip_grad_norm", "training_step")

    def training_step(self: Any, model: Any, *arguments: Any) -> Any:
        assert not set(classes) & set(vars(self)), "the trainer's methods are its class's"
        assert not {"reduce", "timed"} & set(vars(getattr(self.strategy, "reduction", self.strategy)))
        assert not any(module._forward_pre_hooks for module in self.model.modules())
        assert not profiler._is_profiler_enabled
        return usual(self, model, *arguments)

    trainer.ShareTrainer.training_step = training_step
    code = main()
    assert not [name for name in sys.modules if name.startswith("homelab.worker.profiling")]
    return code


def test_it_ends_with_the_last_step_and_is_not_made_again(forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    """A second attempt from before these steps does them again, and profiles none of them."""
    run = asked(harness.make_run(tmp_path / "run", model, data, **RECIPE | {"checkpoint__every_steps": 2}), ranks=(1,))
    forks.train(run, 1, [7, 5])
    assert sorted(path.name for path in (run / "profiles").iterdir()) == ["rank-1"]
    assert [note for note in notes(run, rank=1) if "are profiled" in note] and not [note for note in notes(run) if "profiled" in note]
    made_at = (run / "profiles/rank-1/profile.json").stat().st_mtime_ns
    forks.train(run, 2, [7, 5], resume_step=2)
    assert list(harness.losses(run, 2)) == [3, 4, 5, 6]
    assert (run / "profiles/rank-1/profile.json").stat().st_mtime_ns == made_at
    assert sorted(path.name for path in (run / "profiles").iterdir()) == ["rank-1"]


@pytest.mark.thorough
def test_the_first_step_can_be_profiled(forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    run = asked(harness.make_run(tmp_path / "run", model, data, **RECIPE), first=1, last=1)
    forks.train(run, 1, [12])
    summary, _ = profile_of(run)
    assert summary["steps"] == [1] and summary["usual_step_s"] is None and summary["exchanges"] == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run's profiles on a disk of 256 KiB."""
    if os.geteuid():
        pytest.skip("a small disk needs root")
    folder = tmp_path / "run" / "profiles"
    mounted = []

    def mount(run: Path) -> Path:
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)], check=True)
        mounted.append(folder)
        return run

    try:
        yield mount
    finally:
        for place in mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize(("entry", "words"), [("careful", " MB are needed"), ("careless", "No space left on device")])
def test_a_full_disk_costs_the_profile_and_not_the_training(
    entry: str, words: str, small_disk: Any, forks: harness.Forks, tmp_path: Path, model: Path, data: Path
) -> None:
    """Without room it is not begun; where the disk fills up meanwhile, half a trace is removed."""
    run = small_disk(asked(harness.make_run(tmp_path / "run", model, data, **RECIPE)))
    codes, output = forks.run(run, 1, [12], entry=f"{HERE}:{entry}")
    assert codes == [0], output
    assert list(harness.losses(run, 1)) == [1, 2, 3, 4, 5, 6]
    (note,) = [note for note in notes(run) if "profile" in note]
    assert note.startswith("no profile of rank 0, the training continues: while ") and "No space left on device" in note and words in note
    assert f"node here, {run}/profiles/rank-0" in note and f"fix: make room (df -h {run})" in note
    assert list((run / "profiles").iterdir()) == [], "half a trace is removed"


def careful() -> int:
    """The worker as it is."""
    from homelab.worker.training.train import main

    return main()


def careless() -> int:
    """A worker that looks for no room before."""
    from homelab.worker.profiling import raw_profile
    from homelab.worker.training.train import main

    raw_profile.check_room = lambda folder, events: None
    return main()


@pytest.mark.parametrize(
    "fault", ["breaking", pytest.param("refusing", marks=pytest.mark.thorough), pytest.param("damaging", marks=pytest.mark.thorough)]
)
def test_a_profiler_that_fails_costs_the_profile_and_not_the_training(
    fault: str, forks: harness.Forks, tmp_path: Path, model: Path, data: Path
) -> None:
    run = asked(harness.make_run(tmp_path / fault, model, data, **RECIPE))
    codes, output = forks.run(run, 1, [7, 5], entry=f"{HERE}:{fault}")
    assert codes == [0, 0] and "Traceback" not in output, output
    assert list(harness.losses(run, 1)) == [1, 2, 3, 4, 5, 6]
    (note,) = [note for note in notes(run) if "profile" in note]
    assert "the training continues" in note and "fix: launch again with other steps" in note, note
    assert list(run.glob("profiles/*")) == [] and list(run.glob("profiles/.*")) == []


def refusing() -> int:
    """A worker whose profiler does not start."""
    return _failing("start")


def breaking() -> int:
    """A worker whose profiler does not come through the second step."""
    return _failing("step", after=1)


def damaging() -> int:
    """A worker whose profiler writes half a trace."""
    from torch.profiler import profile

    from homelab.worker.training.train import main

    def write(_self: Any, path: str) -> None:
        Path(path).write_text('{"traceEvents": [{"ph": ')

    profile.export_chrome_trace = write
    return main()


def _failing(method: str, after: int = 0) -> int:
    from torch.profiler import profile

    from homelab.worker.training.train import main

    usual = getattr(profile, method)
    calls = []

    def fail(self: Any) -> Any:
        calls.append(method)
        if len(calls) > after:
            raise RuntimeError("the profiler is in use")
        return usual(self)

    setattr(profile, method, fail)
    return main()
