"""What a run of the benchmark has cost."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from homelab.controller.features.bench import cell_run, table
from homelab.controller.features.bench.cell import Cell
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.run_messages import CardJoules
from tests import builders
from tests.controller.features.bench.test_side_by_side import sources

pytestmark = pytest.mark.timeout(30)


def test_a_token_costs_its_part_of_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 steps of 120 tokens, the first of them the warm-up, which the meter does not tell from the others."""
    name = builders.NAMES[0]
    known = dataclasses.replace(
        sources("one", 1, 1.0),
        plans={1: builders.plan([builders.rank_plan(0, name, card="GPU-a")])},
        energy={(1, name): [CardJoules(index=0, uuid="GPU-a", joules=1200.0, measured_s=60.0)]},
    )
    monkeypatch.setattr("homelab.controller.features.report.report_sources.gather", lambda *_given: known)
    of_suite: Any = SimpleNamespace(cluster=None, suite=SimpleNamespace(warmup=1), cell=Cell("base", "ddp", (name,)))
    result = cell_run.CellRun._measured(of_suite, None, RunPaths(tmp_path / "one"), 0, 1)  # type: ignore[arg-type]
    assert result.measured is not None and result.measured.tokens == 480
    assert result.joules == pytest.approx(1200.0) and result.joules_per_token == pytest.approx(2.0)
    assert ",2," in table.as_csv([result]).splitlines()[1]
