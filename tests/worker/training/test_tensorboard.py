"""TensorBoard's file is written beside the training, which waits for none of it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from homelab.worker.checkpoints.curves import Curves
from homelab.worker.training.tensorboard import TensorBoard
from tests.worker.checkpoints.test_curves import after, task

pytestmark = pytest.mark.timeout(60)


def shown(folder: Path, tag: str = "train/loss") -> list[tuple[int, float, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return [
        (event.step, round(event.value, 3), event.wall_time) for event in (reader.Scalars(tag) if tag in reader.Tags()["scalars"] else [])
    ]


def test_a_step_does_not_wait_until_those_before_it_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "curves.jsonl").write_text(after(tmp_path, 3).text())
    opened, may_open = TensorBoard._opened, threading.Event()

    def slow(board: TensorBoard) -> Any:
        assert may_open.wait(30)
        return opened(board)

    monkeypatch.setattr(TensorBoard, "_opened", slow)
    board = TensorBoard(tmp_path / "tensorboard", Curves.carried_by(tmp_path, task(tmp_path, resume_step=3)), 3)
    began = time.time()
    board.write(4, {"train/loss": 4.6, "train/grad_norm": None})
    board.write(5, {"train/loss": 4.5})
    written = time.time()
    may_open.set()
    board.close()
    points = shown(tmp_path / "tensorboard")
    assert [(step, value) for step, value, _ in points] == [(1, 4.9), (2, 4.8), (3, 4.7), (4, 4.6), (5, 4.5)]
    assert all(began - 1 <= at_s <= written + 1 for step, _, at_s in points if step > 3), "with the time of the step"


def test_a_disk_that_refuses_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file in its place")
    board = TensorBoard(tmp_path / "tensorboard", Curves(task(tmp_path)), 0)
    board.write(1, {"train/loss": 5.0})
    with pytest.raises(OSError, match="tensorboard"):
        board.close()
    with pytest.raises(OSError, match="tensorboard"):
        board.write(2, {"train/loss": 5.0})


def test_an_attempt_without_a_step_leaves_what_is_there(tmp_path: Path) -> None:
    TensorBoard(tmp_path / "tensorboard", Curves(task(tmp_path)), 0).close()
    assert not (tmp_path / "tensorboard").exists()


def test_the_figures_of_pairs_outlive_a_recovery(tmp_path: Path) -> None:
    """No checkpoint carries them: the older file of this node has them alone."""
    board = TensorBoard(tmp_path / "tensorboard", Curves(task(tmp_path, objective={"kind": "dpo"})), 0)
    for step in range(1, 6):
        board.write(step, {"train/loss": 5.0 - step / 10, "train/perplexity": None, "train/margin": step / 10})
    board.write(4, {"eval/loss": 4.6, "eval/accuracy": 0.75})
    board.close()
    (tmp_path / "curves.jsonl").write_text(after(tmp_path, 4, objective={"kind": "dpo"}).text())
    again = TensorBoard(tmp_path / "tensorboard", Curves.carried_by(tmp_path, task(tmp_path, resume_step=4, objective={"kind": "dpo"})), 4)
    again.write(5, {"train/loss": 4.5, "train/perplexity": None, "train/margin": 0.7})
    again.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1

    def points(tag: str) -> list[tuple[int, float]]:
        return [(step, value) for step, value, _ in shown(tmp_path / "tensorboard", tag)]

    assert points("train/margin") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.7)] and points("eval/accuracy") == [(4, 0.75)]
    assert points("train/loss") == [(1, 4.9), (2, 4.8), (3, 4.7), (4, 4.6), (5, 4.5)]
    assert not points("train/perplexity"), "of pairs the loss says nothing of it"
