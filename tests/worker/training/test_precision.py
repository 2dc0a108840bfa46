"""The precision of a plan is that of every pass: whatever the strategy, adapters compute in it while they train and while held-out rows are looked at.

A rank that computes them in fp32 has losses so near to those in 16 bits that no comparison of two rounded trainings sees it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness
from tests.worker.training.test_exactness import COMMON

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

FROM_HOST = {"layers": 2, "group": 2, "places": 2, "host": "memory"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "alone": {"shares": [12], "micro_batch": 4},
    "ddp": {"shares": [7, 5], "micro_batch": 4},
    "zero2": {"shares": [7, 5], "micro_batch": 4, "strategy": "zero2"},
    "zero3": {"shares": [7, 5], "micro_batch": 4, "strategy": "zero3"},
    "pipeline": {"shares": [12, 0], "micro_batch": 4, "stages": [2, 2]},
    "alone, streamed": {"shares": [12], "micro_batch": 4, "streaming": [FROM_HOST]},
    "ddp, streamed": {"shares": [7, 5], "micro_batch": 4, "streaming": [FROM_HOST, None]},
    "pipeline, streamed": {"shares": [12, 0], "micro_batch": 4, "stages": [2, 2], "streaming": [FROM_HOST, FROM_HOST]},
}
QUICK = ("alone, streamed", "pipeline, streamed")
DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


def watched() -> int:
    """The worker, which writes down the types that its adapters give out from its first step on, with a graph and without."""
    import torch

    from homelab.worker.training.train import main
    from homelab.worker.training.trainer import ShareTrainer

    seen: set[tuple[str, bool]] = set()
    own, step = torch.nn.Linear.forward, ShareTrainer.get_batch_samples

    def first_step(self: Any, *rest: Any) -> Any:
        torch.nn.Linear.forward = forward
        return step(self, *rest)

    def forward(self: Any, rows: torch.Tensor) -> torch.Tensor:
        result = own(self, rows)
        if self.weight.requires_grad:
            seen.add((str(result.dtype), torch.is_grad_enabled()))
        return result

    ShareTrainer.get_batch_samples = first_step
    try:
        return main()
    finally:
        (Path(os.environ["HOMELAB_RUN_DIR"]) / f"types-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(sorted(seen)))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.tiny_llama(tmp_path_factory.mktemp("deep") / "tiny-llama", hidden=64, intermediate=128, layers=4)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in STRATEGIES])
def test_every_pass_has_the_precision_of_the_plan(
    name: str, precision: str, forks: harness.Forks, tmp_path: Path, deep: Path, data: Path
) -> None:
    recipe = COMMON | {
        "method__kind": "lora", "train__steps": 2, "train__precision": precision, "train__gradient_checkpointing": True, "data__eval_fraction": 0.1,
        "tracking__eval_every_steps": 1, "checkpoint__every_steps": 2,
    }  # fmt: skip
    run, plan = harness.make_run(tmp_path / "run", deep, data, **recipe), dict(STRATEGIES[name])
    forks.train(run, 1, plan.pop("shares"), precision=precision, entry=f"{__name__}:watched", **plan)
    for rank in range(len(STRATEGIES[name]["shares"])):
        found = json.loads((run / f"types-{rank}.json").read_text())
        assert found == [[DTYPES[precision], False], [DTYPES[precision], True]], f"rank {rank}"
