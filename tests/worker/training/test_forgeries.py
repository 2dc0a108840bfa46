"""Honest runs pass and forged ones do not, ten of ten: the table behind the bounds of `homelab verify`. With -s it is printed."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.features.verify.step_record import StepRecord, Window
from homelab.controller.features.verify.window_verdict import BOUNDS, WindowCompared, WindowMachines, WindowResult, judged
from homelab.shared.protocol import chain
from tests.worker import harness
from tests.worker.training.test_recomputed import RECIPE, recomputed

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(3600)]

SEEDS = range(10)
WINDOW = Window(begin=2, end=4)
HONEST: dict[str, tuple[list[int], dict[str, Any]]] = {
    "1 rank": ([12], {}), "2 ranks": ([4, 8], {}), "3 ranks": ([3, 4, 5], {}), "pipeline": ([12, 0], {"stages": [1, 1]}),
    "1 rank, other passes": ([12], {"micro_batch": 1}),
}  # fmt: skip
FORGED: dict[str, dict[str, Any]] = {
    "learning rate + 1 %": {}, "one row exchanged": {"entry": "tests.worker.training.forger:one_row"},
    "two steps swapped": {"entry": "tests.worker.training.forger:two_steps"},
}  # fmt: skip


def trained(forks: harness.Forks, run: Path, precision: str, *, rate: float = 1.0, **entry: Any) -> StepRecord:
    """The record of a run that was trained with `rate` times the rate of its recipe."""
    honest = (run / "run.json").read_text()
    described = json.loads(honest)
    described["recipe"]["train"]["learning_rate"] *= rate
    (run / "run.json").write_text(json.dumps(described))
    forks.train(run, 1, [7, 5], precision=precision, **entry)
    (run / "run.json").write_text(honest)
    return StepRecord((run / "final" / chain.RECORD).read_text())


def checked(forks: harness.Forks, run: Path, record: StepRecord, precision: str, shares: list[int], **plan: Any) -> WindowResult:
    assert not record.faults(chain.of_card((run / "final/README.md").read_text()), least_steps=6), "a forger writes a whole record"
    passes = {str(step): line.passes for step, line in record.steps.items()}
    lines, compared = recomputed(forks, run, WINDOW.begin, WINDOW.end, shares, passes, precision=precision, **plan)
    again = StepRecord("\n".join(map(json.dumps, lines)))
    machines = WindowMachines(run=run.name, nodes=("here",), strategy="ddp", precision=precision)
    return judged(record, WINDOW, again, WindowCompared.model_validate(compared), machines)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ten_of_ten(forks: harness.Forks, tmp_path: Path, model: Path, data: Path, precision: str) -> None:
    found: dict[str, list[WindowResult]] = defaultdict(list)
    edits: dict[str, int] = defaultdict(int)
    for seed in SEEDS:
        recipe: dict[str, Any] = {**RECIPE, "train__seed": seed, "train__precision": precision}
        run = harness.make_run(tmp_path / f"honest-{seed}", model, data, **recipe)
        record = trained(forks, run, precision)
        for name, (shares, plan) in HONEST.items():
            found[name].append(checked(forks, run, record, precision, shares, **plan))
        for number, (name, entry) in enumerate(FORGED.items()):
            forged = harness.make_run(tmp_path / f"forged-{number}-{seed}", model, data, **recipe)
            bad = trained(forks, forged, precision, rate=1.0 if entry else 1.01, **entry)
            found[name].append(checked(forks, forged, bad, precision, [12]))
        lines = (run / "final" / chain.RECORD).read_text().splitlines()
        card = chain.of_card((run / "final/README.md").read_text())
        place = next(
            place for place, line in enumerate(lines) if json.loads(line)["kind"] == "train" and json.loads(line)["step"] == 1 + seed % 5
        )
        changed = json.loads(lines[place])
        changed["loss"] += 1e-6
        for name, text in {
            "a line changed": [*lines[:place], json.dumps(changed), *lines[place + 1 :]],
            "two lines swapped": [*lines[:place], lines[place + 1], lines[place], *lines[place + 2 :]],
            "the end cut off": lines[: -1 - seed % 5],
        }.items():
            edits[name] += bool(StepRecord("\n".join(text)).faults(card))
    bounds = BOUNDS[precision]
    print(f"\n{precision}: bounds {bounds.loss:.0e} of a loss, {bounds.weights:.0e} of the way of the weights")
    for name, results in found.items():
        losses, weights = [result.loss_apart or 0 for result in results], [result.weights_apart or 0 for result in results]
        agree, unclear = (sum(result.verdict == word for result in results) for word in ("agrees", "unclear"))
        span = f"loss {min(losses):.1e} to {max(losses):.1e}; weights {min(weights):.1e} to {max(weights):.1e}"
        print(f"{name:22} agrees {agree:2}, unclear {unclear:2} of {len(results)}; {span}")
    print(*(f"{name:22} found {count} of {len(SEEDS)}" for name, count in edits.items()), sep="\n")
    others = found.pop("1 rank, other passes")  # bf16 rounds them otherwise: that accuses nobody
    assert {result.verdict for result in others} <= {"agrees"} | ({"unclear"} if precision == "bf16" else set())
    for name, results in found.items():
        if name in HONEST:
            assert all(result.verdict == "agrees" for result in results), name
            continue
        # The true rows may be too long for the passes that a forged record names: in bf16 such a window is unclear.
        told = [result for result in results if precision == "fp32" or result.same_passes]
        assert all(result.verdict == "differs" and "do" in result.because for result in told), name
        assert not any(result.verdict == "agrees" for result in results), name
        assert len(told) == len(SEEDS) or (precision == "bf16" and name != "learning rate + 1 %"), name
    assert set(edits.values()) == {len(SEEDS)} and len(edits) == 3
