"""What the worker needs of the Trainer is in every release that homelab installs."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.worker.errors import WorkerError
from homelab.worker.training import trainer_members

# dir(transformers.Trainer) of the newest release that Unsloth goes with (2026.10.9: transformers 5.17.0), read in its own environment.
OF_UNSLOTH = type(
    "Trainer", (), dict.fromkeys((Path(__file__).parent / "recorded" / "trainer_5_17.txt").read_text(encoding="utf-8").split())
)


def test_unsloth_and_its_older_trainer_train_with_ddp() -> None:
    trainer_members.refuse_other(OF_UNSLOTH, places_model=False)


def test_a_model_that_is_divided_needs_a_newer_one_and_says_so() -> None:
    with pytest.raises(WorkerError) as refused:
        trainer_members.refuse_other(OF_UNSLOTH, places_model=True)
    assert (
        "_sync_replicated_trainable_parameters" in refused.value.message
        and "homelab setup" in refused.value.hint
        and "ddp" in refused.value.hint
    )


def test_the_trainer_of_this_environment_has_all() -> None:
    from transformers import Trainer

    trainer_members.refuse_other(Trainer, places_model=True)
