"""Who reads a checkpoint of a run that trains keeps it whole, whatever [checkpoint] keep removes meanwhile."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from homelab.shared.protocol.manifest import folder_name
from homelab.worker.checkpoints import checkpoint_folder, disk_space, held
from homelab.worker.checkpoints.tensor_files import writers_of
from homelab.worker.checkpoints.weights import WEIGHTS, trained
from homelab.worker.errors import WorkerError
from homelab.worker.model.build import load_model
from homelab.worker.tools import chat, conversation, model_export, run_model
from tests.worker import harness

_HASH = "0123456789abcdef"


def _save(root: Path, step: int) -> Path:
    """A checkpoint of this step, as the only one: what [checkpoint] keep = 1 leaves."""
    folder = checkpoint_folder.write(root, step, _HASH, {"x.txt": lambda path: path.write_text(f"step {step}")})
    checkpoint_folder.retain(root, 1)
    return folder


def test_it_stays_while_it_is_read_and_nothing_is_left(tmp_path: Path) -> None:
    own = _save(tmp_path, 1)
    with held.newest(tmp_path, _HASH) as folder:
        _save(tmp_path, 2)
        assert not own.exists(), "the control: the run has removed it"
        assert (folder / "x.txt").read_text() == "step 1" and checkpoint_folder.verify(folder, _HASH)["step"] == 1
        assert checkpoint_folder.complete_steps(tmp_path) == [2], "what is held does not count as a checkpoint"
    assert [path.name for path in tmp_path.iterdir()] == [folder_name(2)]


def test_one_that_goes_at_this_moment_is_followed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 1)
    link, calls = os.link, []

    def late(source: Path, place: Path) -> None:
        calls.append(source)
        if len(calls) == 1:
            _save(tmp_path, 2)
        link(source, place)

    monkeypatch.setattr(os, "link", late)
    with held.newest(tmp_path, _HASH, least=1) as folder:
        assert folder.name == folder_name(2)
    assert [path.name for path in tmp_path.iterdir()] == [folder_name(2)]


def test_the_step_that_was_asked_for_is_taken_where_it_is_there(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint_folder.write(tmp_path, step, _HASH, {"x.txt": lambda path: path.write_text("x")})
    for asked, found in ((0, 3), (1, 1), (2, 2)):
        with held.newest(tmp_path, _HASH, least=asked) as folder:
            assert folder.name == folder_name(found)
    with pytest.raises(WorkerError, match="no complete checkpoint"), held.newest(tmp_path, _HASH, least=4):
        pass


def test_a_disk_without_hard_links_is_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = _save(tmp_path, 1)

    def refused(source: Path, place: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with held.newest(tmp_path, _HASH) as folder:
        assert folder == own
    assert [path.name for path in tmp_path.iterdir()] == [own.name]


def test_a_full_disk_takes_it_back_and_the_reader_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 1)
    monkeypatch.setattr(disk_space, "_free_bytes", lambda root: 0)
    with pytest.raises(WorkerError, match="the run that trains comes first"), held.newest(tmp_path, _HASH) as folder:
        with pytest.raises(WorkerError, match="cannot be written"):
            disk_space.make(tmp_path, 2, 1, 1)
        (folder / "x.txt").read_text()


def test_another_missing_file_keeps_its_own_error(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    with pytest.raises(FileNotFoundError, match="elsewhere"), held.newest(tmp_path, _HASH):
        (tmp_path / "elsewhere").read_text()


def test_a_damaged_one_is_named_by_its_own_place(tmp_path: Path) -> None:
    """The hint says which folder to remove: that of the links is gone by then."""
    own = _save(tmp_path, 1)
    (own / "x.txt").write_text("step 9")
    with pytest.raises(WorkerError, match="altered") as caught, held.newest(tmp_path, _HASH):
        pass
    assert caught.value.where == str(own / "x.txt") and f"remove the folder {own} on" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == [own]


def test_the_next_reader_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    own = _save(tmp_path, 1)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / f".{folder_name(1)}.{gone.pid}.held").mkdir()
    with held.newest(tmp_path, _HASH):
        pass
    assert list(tmp_path.iterdir()) == [own]


def test_an_attempt_removes_what_a_killed_reader_left(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left, living = (tmp_path / f".{folder_name(1)}.{pid}.held" for pid in (gone.pid, os.getpid()))
    left.mkdir(), living.mkdir()
    held.clear(tmp_path)
    assert list(tmp_path.iterdir()) == [living]


@pytest.fixture
def training(tmp_path: Path, model: Path, data: Path) -> Path:
    """A run with a checkpoint of step 3 and no final model."""
    run_dir = harness.make_run(tmp_path / "run", model, data, method__kind="lora")
    harness.make_plan(run_dir, 1, [12])
    _train(run_dir, model, 3)
    return run_dir


def _train(run_dir: Path, model: Path, step: int) -> None:
    """The run goes on to `step` and keeps one checkpoint."""
    run = run_model.read_run(run_dir)
    built = load_model(run_model.task_of(run, run_dir), str(model), lambda note: None)
    checkpoint_folder.write(run_dir / "checkpoints", step, run["recipe_hash"], writers_of({WEIGHTS: trained(built)}))
    checkpoint_folder.retain(run_dir / "checkpoints", 1)


def test_chat_and_export_outlive_the_checkpoint_that_they_read(training: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a card: the run saved and removed while the base was loading, and both ended with "No such file or directory"."""
    steps, load = iter(range(4, 9)), chat.load

    def slow(*arguments: Any) -> object:
        _train(training, model, next(steps))
        return load(*arguments)

    monkeypatch.setattr(chat, "load", slow)
    assert "answer" in chat.answer({"run_dir": str(training), "prompt": "abc", "max_new_tokens": 1})
    assert conversation.Conversation(training, ["trained"], threading.Event()).model is not None
    assert checkpoint_folder.complete_steps(training / "checkpoints") == [5], "the control: two were removed meanwhile"
    assert model_export.export(training, 3) == "exports/step-00000005", "the node names the newer one that it has made"
    assert not list((training / "checkpoints").glob(".*"))
