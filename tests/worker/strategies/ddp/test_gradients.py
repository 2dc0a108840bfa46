"""One copy of the gradient: in a step of several passes it is in DDP's buckets after every one of them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def watched() -> int:
    """The worker's `main`, which also writes down after each pass whether every gradient lies in a bucket that is reduced in this step."""
    from homelab.worker.training import train
    from homelab.worker.training.trainer import ShareTrainer

    passes: list[set[int]] = []
    buckets: set[int] = set()
    found: list[list[bool]] = []

    def places(trainer: ShareTrainer) -> set[int]:
        trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        return {0 if parameter.grad is None else parameter.grad.untyped_storage().data_ptr() for parameter in trained}

    begin, reduce = ShareTrainer.training_step, ShareTrainer.create_accelerator_and_postprocess

    def created(self: ShareTrainer) -> None:
        reduce(self)
        strategy: Any = self.strategy
        told, reduced = self.hooks.after_pass, strategy.reduction.reduce

        def after_pass() -> None:
            passes.append(places(self))
            told()

        def seen(bucket: Any) -> Any:
            buckets.add(bucket.buffer().untyped_storage().data_ptr())
            return reduced(bucket)

        self.hooks = replace(self.hooks, after_pass=after_pass)
        strategy.reduction.reduce = seen

    def step(self: ShareTrainer, *args: Any, **kwargs: Any) -> Any:
        passes.clear()
        buckets.clear()
        result = begin(self, *args, **kwargs)
        found.append([held <= buckets for held in passes])
        return result

    ShareTrainer.create_accelerator_and_postprocess = created
    ShareTrainer.training_step = step
    code = train.main()
    Path(os.environ["HOMELAB_RUN_DIR"], f"places-{os.environ['RANK']}.json").write_text(json.dumps(found))
    return code


def test_gradients_of_every_pass_are_in_the_buckets(forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    run = harness.make_run(tmp_path / "run", model, data, train__epochs=None, train__steps=3)
    codes, output = forks.run(
        run, 1, [7, 5], micro_batch=2, entry="tests.worker.strategies.ddp.test_gradients:watched", switches={"joined_rows": False}
    )
    assert not any(codes), output
    for rank in (0, 1):
        steps = json.loads((run / f"places-{rank}.json").read_text())
        assert len(steps) == 3 and all(len(passes) > 1 and all(passes) for passes in steps), steps
