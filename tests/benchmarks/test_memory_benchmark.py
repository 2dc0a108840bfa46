"""What loads a model as a worker does, outside of a run: it must know what a worker asks of its plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import memory
from benchmarks.gpu_parts import material, restart_start

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_a_real_step_needs_the_bytes_of_the_dry_run(tmp_path: Path, kind: str) -> None:
    folder = memory._save(tmp_path / "small", material.SHAPES["tiny"])
    run = memory.situation("tiny", kind, "fp32", "cpu", 32, 1, True, False)
    assert memory._dry(material.SHAPES["tiny"], run)["peak_bytes"] == pytest.approx(memory._real_step(folder, run), rel=0.02)


def test_a_start_is_timed_part_by_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = material.model(tmp_path / "model", "tiny")
    assert restart_start.main("cpu", str(model), "lora", "worker", str(tmp_path / "run")) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("took ")] == [
        "import", "context", "load", "adapters", "first_pass", "second_pass",
    ]  # fmt: skip
