"""What a base model's files give before any method: the folder, the tokenizer, what transformers reads of them, and which part a rank loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from homelab.worker.model import base_kind

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LoadedPart:
    """What of the model a rank loads, as its strategy says it to those who build, check and save the model.

    `reader` reads the files where it is not transformers' own; `takes_kept`: it knows layers that were quantised before (`kept`). `is_stage`: other ranks
    have the other layers, and `words` names the own ones. `has_loss`: the loss is computed here. `is_gathered`: every weight is divided over the ranks,
    and gathered for each pass.
    """

    reader: Callable[..., Any] | None = None
    takes_kept: bool = False
    is_stage: bool = False
    words: str = ""
    has_loss: bool = True
    is_gathered: bool = False


WHOLE = LoadedPart()


def model_path(run: dict[str, Any]) -> str:
    """The base model's folder (with ~ expanded) or hub id. Raises WorkerError for a folder that holds no model."""
    name = str(run["recipe"]["model"]["name"])
    if not name.startswith(("/", "~")):
        return name
    folder = Path(name).expanduser()
    base_kind.refuse_folder(folder)
    return str(folder)


def load_tokenizer(run: dict[str, Any], path: str) -> Any:
    """The model's own tokenizer, whose chat template has the time of the launch; one without a padding token pads with its end token (padding never
    carries loss)."""
    from transformers import AutoTokenizer

    from homelab.worker.data import template_clock

    tokenizer = from_pretrained(AutoTokenizer, path, revision=run["recipe"]["model"].get("revision"))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return template_clock.bind(tokenizer, template_clock.moment_of(run))


def from_pretrained(auto: Any, path: str, **options: Any) -> Any:
    """`auto.from_pretrained` with a user's mistakes as WorkerError. Never runs code that comes with a model."""
    try:
        return auto.from_pretrained(path, trust_remote_code=False, **options)
    except Exception as error:
        known = base_kind.load_error(error, path, "tokenizer" if "Tokenizer" in auto.__name__ else "model")
        if known is error:
            raise
        raise known from error
