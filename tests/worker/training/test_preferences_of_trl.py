"""Against TRL 1.16 on one process, twenty steps of AdamW in the same order: the losses and the weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from homelab.worker.data import compared_answers
from homelab.worker.data.rows import Row
from tests.worker import harness
from tests.worker.training.test_preferences import labelled, pairs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, BATCH, RATE = 20, 4, 3e-4
KINDS = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "orpo": 0.1, "kto": 0.1, "reward": 0.1}  # with its beta


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, model: Path, forks: harness.Forks
) -> dict[str, tuple[Path, list[float], dict[str, Any]]]:
    """Of each objective our run on two ranks, and TRL's losses and weights."""
    folder = tmp_path_factory.mktemp("trl")
    trainings: list[dict[str, Any]] = []
    runs = {}
    for kind, beta in KINDS.items():
        rows: list[Any] = labelled(STEPS * BATCH, most=3) if kind == "kto" else pairs(STEPS * BATCH, most=3)
        data = harness.write_jsonl(folder / f"{kind}.jsonl", rows)
        run = runs[kind] = harness.make_run(
            folder / kind, model, data, objective__kind=kind, objective__beta=beta, method__kind="full", data__template="none", train__epochs=None,
            train__steps=STEPS, train__global_batch=BATCH, train__learning_rate=RATE, train__schedule="constant", train__warmup_steps=0, train__weight_decay=0.0,
            train__max_grad_norm=0.5, checkpoint__every_steps=STEPS,
        )  # fmt: skip
        forks.train(run, 1, [3, 1], micro_batch=[2, 1])
        taken = harness.samples(run, 1, 2)
        order = [place for step in range(1, STEPS + 1) for place in taken[step]]
        weights = str(folder / f"{kind}.safetensors")
        trainings.append(
            {
                "kind": kind,
                "beta": beta,
                "rows": [rows[place] for place in order],
                "steps": STEPS,
                "batch": BATCH,
                "rate": RATE,
                "weights": weights,
            }
        )
        if kind == "reward":
            trainings[-1]["seed"] = harness.resolved_recipe()["train"]["seed"]
        if kind == "kto":
            trainings[-1]["others"] = [order.index(answering(len(rows))[place]) for place in order]
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.training.trl_training"], input=json.dumps({"model": str(model), "trainings": trainings}), cwd=harness.REPOSITORY,
        capture_output=True, text=True, timeout=240, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(harness.REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    losses = json.loads(done.stdout)
    return {kind: (runs[kind], losses[place], load_file(trainings[place]["weights"])) for place, kind in enumerate(KINDS)}


def answering(count: int) -> list[int]:
    """Of each row, the row whose answer it is compared with."""
    rows = [Row(array("i", [place, place]), bytes([0, 1]), (place,)) for place in range(count)]
    compared_answers.fill_others(rows, harness.resolved_recipe()["train"]["seed"], 2)
    return [row.other.tokens[1] for row in rows if row.other is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_weights_are_those_of_trl(kind: str, trained: dict[str, tuple[Path, list[float], dict[str, Any]]]) -> None:
    run, losses, weights = trained[kind]
    assert list(harness.losses(run, 1).values()) == pytest.approx(losses, rel=1e-6, abs=1e-6)
    own = harness.weights(run, STEPS)
    assert (
        harness.relative_error(own, {name: weights[name.replace("lm_head", "score") if kind == "reward" else name] for name in own}) <= 1e-5
    )
    other = next(name for name in KINDS if name != kind)
    assert losses != pytest.approx(trained[other][1], rel=1e-2), "each objective has its own"
