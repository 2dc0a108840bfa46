"""How long ranks wait for each other, and where: at the store before what follows unequal work, not in a collective."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.worker import harness

PLACES = ["quick", "slow"]
COLLECTIVE_S, LATE_S = 4.0, 6.0


@pytest.mark.parametrize(
    ("expected", "patience_s"),
    [
        (None, 1800.0),
        ({"step_s": 2.0, "evaluate_s": 60.0}, 1800.0),
        ({"step_s": 900.0, "evaluate_s": 0.0}, 2700.0),
        ({"step_s": 1.0, "evaluate_s": 1000.0}, 3000.0),
    ],
)
def test_a_collective_may_take_three_times_what_the_plan_expects(expected: dict[str, float] | None, patience_s: float) -> None:
    from homelab.worker.runtime import process_group

    assert process_group.patience_s({"time": expected}) == patience_s
    assert process_group.patience_s({}) == 1800.0


def test_before_the_losses_are_gathered_all_have_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from homelab.worker.data.batches import Form, stand_in
    from homelab.worker.runtime import process_group
    from homelab.worker.strategies.base import Strategy
    from homelab.worker.training import evaluate

    happened: list[str] = []

    def gather(values: list[float]) -> list[list[float]]:
        happened.append("gathered")
        return [[6.0, 3.0]]

    monkeypatch.setattr(process_group, "gather", gather)
    monkeypatch.setattr(Form, "counted", lambda form, batch: 1)

    class Model:
        def eval(self) -> None:
            pass

        def parameters(self) -> Any:
            return iter([torch.zeros(1)])

        def __call__(self, **batch: Any) -> SimpleNamespace:
            return SimpleNamespace(loss=torch.tensor(2.0))

    strategy = Strategy(SimpleNamespace(rank=0))  # type: ignore[arg-type]
    balance: Any = SimpleNamespace(rows_of=lambda lengths, rank: [0], passes_of=lambda lengths, rank: [[0]])
    loss = evaluate.held_out_loss(
        Model(),
        [stand_in(0)],
        balance,
        0,
        Form(pad=0),
        evaluate.EvaluationHooks(strategy, lambda: happened.append("pass"), lambda: happened.append("waited")),
    )
    assert loss == (2.0, {}) and happened == ["pass", "waited", "gathered"]


@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_a_slow_disk_and_a_slow_evaluation_hold_no_collective_open(tmp_path: Path, model: Path, data: Path, forks: harness.Forks) -> None:
    """One rank is six seconds late wherever it reads or evaluates; collectives end after four."""
    run = harness.make_run(tmp_path / "run", model, data, train__steps=4, train__epochs=None, data__eval_fraction=0.2)
    entry = "tests.worker.runtime.test_patience:late"
    for attempt, resume_step in ((1, 0), (2, 2)):
        codes, output = forks.run(run, attempt, [6, 6], nodes=PLACES, entry=entry, resume_step=resume_step, timeout_s=120)
        assert codes == [0, 0], output


def late() -> int:
    import datetime

    import torch.distributed as dist

    from homelab.worker.checkpoints import weights
    from homelab.worker.runtime import process_group
    from homelab.worker.strategies.base import Strategy
    from homelab.worker.training.train import main
    from homelab.worker.training.trainer import ShareTrainer

    connect, load, restore, evaluate = (
        process_group.connect,
        weights.load_weights,
        ShareTrainer._load_optimizer_and_scheduler,
        Strategy.evaluate,
    )

    def connected(task: Any) -> None:
        connect(task)
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=COLLECTIVE_S))

    evaluated: list[bool] = []

    def wait_once(strategy: Strategy, *given: Any) -> float:
        if not evaluated:
            evaluated.append(True)
            time.sleep(LATE_S)
        return evaluate(strategy, *given)

    process_group.connect = connected
    if os.environ["HOMELAB_NODE"] == "slow":
        weights.load_weights = lambda *a: (time.sleep(LATE_S), load(*a))[1]
        ShareTrainer._load_optimizer_and_scheduler = lambda self, folder: (time.sleep(LATE_S), restore(self, folder))[1]
        Strategy.evaluate = wait_once
    return main()
