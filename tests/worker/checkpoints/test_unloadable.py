"""A checkpoint whose bytes are right and that torch refuses: named before anything is loaded, set aside where an older one will do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from homelab.worker.checkpoints import checkpoint_folder, load_check
from homelab.worker.errors import WorkerError
from homelab.worker.runtime.task import Task
from tests.worker.checkpoints.test_curves import task

pytestmark = pytest.mark.timeout(30)


class Spiteful:
    """What a pickle can do to who loads it."""

    def __reduce__(self) -> Any:
        return (print, ("it was called",))


def save(root: Path, step: int, optimizer: Any) -> Path:
    writers = {
        "trainable.safetensors": lambda path: save_file({"w": torch.ones(3)}, str(path)),
        "optimizer.pt": lambda path: torch.save(optimizer, path),
        "trainer_state.json": lambda path: path.write_text(json.dumps({"global_step": step})),
    }
    return checkpoint_folder.write(root, step, "r1", writers)


def looked(at: Task, folder: Path) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        load_check.refuse(folder, at.run_dir.name)
    return load_check.set_aside(caught.value, at)


def test_what_can_be_loaded_is_let_through(tmp_path: Path) -> None:
    load_check.refuse(save(tmp_path, 20, {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-3}]}), "run")


def test_it_is_named_and_set_aside_and_the_one_before_is_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = task(tmp_path, resume_step=40)
    save(at.checkpoints_dir, 20, {"state": {}})
    bad = save(at.checkpoints_dir, 40, {"state": Spiteful()})
    fault = looked(at, bad)
    assert fault.message.startswith("optimizer.pt of the checkpoint cannot be loaded: ") and fault.message.endswith("; it was set aside")
    assert fault.where == str(at.checkpoints_dir / ".step-00000040.corrupt/optimizer.pt") and Path(fault.where).is_file()
    assert fault.hint == f"homelab recover {tmp_path.name} continues from the previous one, of step 20"
    assert checkpoint_folder.complete_steps(at.checkpoints_dir) == [20] and "it was called" not in capsys.readouterr().out


def test_where_no_older_one_can_be_loaded_either_nothing_is_touched(tmp_path: Path) -> None:
    at = task(tmp_path, resume_step=40)
    for step in (20, 40):
        save(at.checkpoints_dir, step, {"state": Spiteful()})
    fault = looked(at, at.checkpoints_dir / "step-00000040")
    assert "set aside" not in fault.message and "no older checkpoint on node1 can be loaded either" in fault.hint
    assert checkpoint_folder.complete_steps(at.checkpoints_dir) == [20, 40]


def test_what_is_damaged_is_left_to_who_looks_for_checkpoints(tmp_path: Path) -> None:
    at = task(tmp_path, resume_step=40)
    fault = WorkerError("a file of the checkpoint is missing", where="x")
    assert load_check.set_aside(fault, at) is fault
