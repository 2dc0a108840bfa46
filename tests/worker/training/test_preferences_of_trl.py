"""Against TRL 1.16 on one process, twenty steps of AdamW in the same order: the losses and the weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker import harness
from tests.worker.training.test_preferences import pairs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

STEPS, BATCH, RATE = 20, 4, 3e-4
COMMON = {
    "max_steps": STEPS, "per_device_train_batch_size": BATCH, "learning_rate": RATE, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 0.5,
    "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "seed": 42, "max_length": 256, "gradient_checkpointing": False, "bf16": False,
    "disable_tqdm": True,
}  # fmt: skip


def _trainer(kind: str, beta: float, folder: Path) -> tuple[Any, Any]:
    """(TRL's trainer, its configuration) of an objective."""
    if kind in ("dpo", "ipo"):
        from trl import DPOConfig, DPOTrainer

        return DPOTrainer, DPOConfig(str(folder), loss_type=["sigmoid" if kind == "dpo" else "ipo"], beta=beta, **COMMON)
    if kind == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer, ORPOConfig(str(folder), beta=beta, **COMMON)
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return CPOTrainer, CPOConfig(str(folder), loss_type="simpo", cpo_alpha=0.0, simpo_gamma=0.5, beta=beta, **COMMON)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """accelerate keeps one state for the whole process."""
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize(("kind", "beta"), [("dpo", 0.1), ("ipo", 0.1), ("simpo", 2.0), ("orpo", 0.1)])
def test_losses_and_weights_are_those_of_trl(
    kind: str, beta: float, tmp_path: Path, model: Path, forks: harness.Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = harness.write_jsonl(tmp_path / "pairs.jsonl", pairs(STEPS * BATCH, most=3))
    run = harness.make_run(
        tmp_path / "run", model, rows, objective__kind=kind, objective__beta=beta, method__kind="full", data__template="none", train__epochs=None,
        train__steps=STEPS, train__global_batch=BATCH, train__learning_rate=RATE, train__schedule="constant", train__warmup_steps=0, train__weight_decay=0.0,
        train__max_grad_norm=0.5, checkpoint__every_steps=STEPS,
    )  # fmt: skip
    forks.train(run, 1, [3, 1], micro_batch=[2, 1])
    ours = harness.losses(run, 1)
    order = [harness.samples(run, 1, 2)[step] for step in range(1, STEPS + 1)]

    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = [json.loads(line) for line in rows.read_text().splitlines()]
    kind_of_trainer, settings = _trainer(kind, beta, tmp_path / "trl")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.bos_token = None  # the experimental trainers add one where a tokenizer knows it, also where it writes none itself
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    monkeypatch.setattr(kind_of_trainer, "_get_train_sampler", lambda self, dataset=None: SequentialSampler(dataset or self.train_dataset))
    trainer = kind_of_trainer(
        model=loaded,
        args=settings,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([read[place] for step in order for place in step]),
    )
    trainer.train()
    theirs = [line["loss"] for line in trainer.state.log_history if "loss" in line and "train_loss" not in line]
    assert list(ours.values()) == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    end = harness.weights(run, STEPS)
    assert harness.relative_error(end, {name: tensor for name, tensor in loaded.state_dict().items() if name in end}) <= 1e-5
