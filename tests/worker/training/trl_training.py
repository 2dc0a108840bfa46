"""python -m tests.worker.training.trl_training: TRL's own training with an objective, in a process of its own: it leaves states in it that others trip over.

Reads {"model": folder, "trainings": [{"kind", "beta", "rows": [row in the order of the steps], "steps", "batch", "rate", "weights": file to write, "others": [place of
the row whose answer each row of kto is compared with], "seed": of the head of a reward model}, ...]} from standard input, and prints the losses of each as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from homelab.worker.model import score_head


def trainer_of(kind: str, beta: float, settings: dict[str, Any]) -> tuple[Any, Any]:
    """(TRL's trainer, its configuration) of an objective."""
    if kind in ("dpo", "ipo"):
        from trl import DPOConfig, DPOTrainer

        return DPOTrainer, DPOConfig(loss_type=["sigmoid" if kind == "dpo" else "ipo"], beta=beta, **settings)
    if kind == "kto":
        from trl import KTOConfig, KTOTrainer

        return KTOTrainer, KTOConfig(beta=beta, **settings)
    if kind == "reward":
        from trl import RewardConfig, RewardTrainer

        return RewardTrainer, RewardConfig(**settings)
    if kind == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer, ORPOConfig(beta=beta, **settings)
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return CPOTrainer, CPOConfig(loss_type="simpo", cpo_alpha=0.0, simpo_gamma=0.5, beta=beta, **settings)


def losses_of(model: str, asked: dict[str, Any], folder: str) -> list[float]:
    settings = {
        "output_dir": folder, "max_steps": asked["steps"], "per_device_train_batch_size": asked["batch"], "learning_rate": asked["rate"],
        "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "seed": 42, "max_length": 256, "gradient_checkpointing": False, "bf16": False, "disable_tqdm": True,
    }  # fmt: skip
    kind, configuration = trainer_of(asked["kind"], asked["beta"], settings)
    kind._get_train_sampler = lambda self, dataset=None: SequentialSampler(dataset or self.train_dataset)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.bos_token = None  # the experimental trainers add one where a tokenizer knows it, also where it writes none itself
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if asked["kind"] == "reward":
        score_head.put_on(loaded, asked["seed"], "all-linear", print)
        head = loaded.lm_head.weight
        loaded = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32, num_labels=1)
        loaded.score.weight.data.copy_(head)
    trainer = kind(model=loaded, args=configuration, processing_class=tokenizer, train_dataset=Dataset.from_list(asked["rows"]))
    if "others" in asked:  # TRL's own choice depends on how rows are divided
        completions = list(trainer.train_dataset["completion_ids"])
        trainer.train_dataset = trainer.train_dataset.map(
            lambda _row, place: {"KL_completion_ids": completions[asked["others"][place]]}, with_indices=True
        )
    trainer.train()
    save_file({name: tensor.clone() for name, tensor in loaded.state_dict().items()}, asked["weights"])
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def main() -> int:
    question = json.load(sys.stdin)
    said, sys.stdout = sys.stdout, sys.stderr
    with tempfile.TemporaryDirectory() as folder:
        answers = [losses_of(question["model"], asked, folder) for asked in question["trainings"]]
    print(json.dumps(answers), file=said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
