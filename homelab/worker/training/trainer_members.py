"""What the worker takes of transformers' Trainer beside its documented methods, and the refusal of a release that has it not.

Releases differ: Unsloth's environment has an older one than the worker's own (5.17 beside 5.23), and trains with ddp alone.
"""

from __future__ import annotations

from importlib.metadata import version

from homelab.worker.errors import WorkerError

ALWAYS = (
    "_clip_grad_norm",
    "_load_from_checkpoint",
    "_move_model_to_device",
    "get_batch_samples",
    "_prepare_for_training",
    "_load_optimizer_and_scheduler",
)
# Came with `is_distributed_loading_by_transformers`, which keeps accelerate from wrapping a model that a strategy has divided.
OF_A_DIVIDED_MODEL = ("_sync_replicated_trainable_parameters",)


def refuse_other(trainer: type, *, places_model: bool) -> None:
    """Raises WorkerError for a Trainer that lacks one of these. `places_model`: the strategy divides the model itself."""
    for name in (*ALWAYS, *(OF_A_DIVIDED_MODEL if places_model else ())):
        if not hasattr(trainer, name):
            raise WorkerError(
                f"transformers {version('transformers')} has no Trainer.{name}, which {'this strategy' if places_model else 'the worker'} needs",
                where="the node's environment, package transformers",
                hint="homelab setup installs the version that homelab was tested with" + ('; or set [parallel] strategy = "ddp"' if places_model else ""),
            )  # fmt: skip
