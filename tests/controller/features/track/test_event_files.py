"""TensorBoard's own reader finds each step of a recovered run once."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.features.track.event_files import EventFiles
from homelab.controller.features.track.points import points_of
from homelab.controller.run.metrics import lines_of
from homelab.controller.run.paths import RunPaths
from tests.controller.features.track import metric_lines

pytestmark = pytest.mark.timeout(120)


def single(value: float) -> float:
    """As TensorBoard stores it."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def written(paths: RunPaths) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for point in points_of(lines_of(paths)):
        for tag, value in point.values.items():
            curves.setdefault(tag, []).append((point.step, single(value)))
    return curves


def read(accumulator: Any) -> dict[str, list[tuple[int, float]]]:
    accumulator.Reload()
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


@pytest.mark.parametrize("restarts", [False, True], ids=["one process", "a process per attempt"])
def test_each_step_is_there_once_and_as_in_metrics_jsonl(tmp_path: Path, restarts: bool) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    paths, folder = metric_lines.run_in(tmp_path), tmp_path / "run" / "tracking" / "tensorboard"
    files = EventFiles(folder)
    looking_on = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    for stage in range(3):
        metric_lines.gather(paths, stage)
        if restarts:
            files.close()
            files = EventFiles(folder)
        files.bring(points_of(lines_of(paths)))
        afterwards = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        assert read(afterwards) == written(paths)
        if not restarts:
            assert read(looking_on) == written(paths)
    assert [step for step, _ in written(paths)["train/loss"]] == list(range(1, 15))
    files.close()
