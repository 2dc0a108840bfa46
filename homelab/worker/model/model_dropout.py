"""The chance in a model's own modules: dropout, layer drop and router noise of its config.json. It is off unless the recipe keeps it.

A mask drawn for a micro-batch depends on which rows share it, so the curve of one rank is not that of two. The recipe alone decides a training, and
a rate that stands in a downloaded file is in no recipe: [method] model_dropout = true takes it into the recipe, with the difference that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from homelab.worker.errors import WorkerError
from homelab.worker.model import inspection
from homelab.worker.model.inspection import Chance
from homelab.worker.model.pretrained import WHOLE, LoadedPart
from homelab.worker.runtime.task import Task

_WHERE = "config.json of the model"
_TOKENS = 64  # whose answers must not change: a router compares with its rate where two experts are nearly equal
_OFF = "leave [method] model_dropout out"


def settle(model: Any, task: Task, note: Callable[[str], None], part: LoadedPart = WHOLE) -> None:
    """Switch the model's own chance off, or keep it where the recipe says so, with a note either way. Raises WorkerError where it cannot be kept, and
    where the stages of a pipeline would draw other numbers than one process."""
    found = [source for source in inspection.chance(model) if not source.is_adapter]
    if not task.method.model_dropout:
        left = switch_off(model)
        if off := [source for source in found if source.place not in {kept.place for kept in left}]:
            note(
                f"model dropout: {_listed(off)} of the model {'is' if len(off) == 1 else 'are'} off, so that the curve does not depend on the cluster"
            )
        found = left
    if (part.is_stage or task.streaming is not None) and task.method.draws and not task.draws_by_layer:
        raise WorkerError(
            "an older homelab began this run, and drew its dropout for all layers in one sequence, which needs the whole model on the device",
            where=f"run {task.run_dir.name}", hint=f"let a node with room for it train: homelab recover {task.run_dir.name} --strategy ddp",
        )  # fmt: skip
    if not found and ((task.method.dropout > 0 and not part.is_stage) or inspection.draws(model) is not True):
        return
    what = _listed(found) or f"{type(model).__name__} draws its own random numbers in training"
    # Each layer begins its own numbers (`layer_seeds`), and a configuration's are read by layers: anything else is drawn on every stage.
    between = [source for source in found if ".layers.*." not in source.place and not source.place.startswith("config.json.")]
    if part.is_stage and (between or not found or not task.method.model_dropout):
        what = _listed(between) or what
        hint = f"{_OFF}; or another strategy" if task.method.model_dropout else 'set [parallel] strategy = "ddp" or "zero3"'
        raise WorkerError(
            f"the stages of a pipeline would draw different numbers from one process: {what}", where=_WHERE, hint=hint, needs_launch=True
        )
    if task.world_size > 1 and any("layerdrop" in source.place or "drop_path" in source.place for source in found):
        raise WorkerError(
            f"ranks that leave out different layers cannot train together: {what}", where=_WHERE, hint=_OFF, needs_launch=True
        )
    note(f"law: {what}: random numbers depend on the rows of a micro-batch")


@torch.no_grad()
def switch_off(model: Any) -> list[Chance]:
    """Set every rate to 0, except those on which the model's answers depend, too (PhiMoE routes by its noise's rate); these are returned."""
    before = _answers(model)
    rates = [(name, rate, set_rate) for name, rate, set_rate in inspection.sources(model) if not inspection.is_adapter(name)]
    for _, _, set_rate in rates:
        set_rate(0.0)
    if before is None or torch.equal(before, _answers(model)):
        return []
    for place in sorted({inspection.pattern(name) for name, _, _ in rates}):
        group = [(rate, set_rate) for name, rate, set_rate in rates if inspection.pattern(name) == place]
        for rate, set_rate in group:
            set_rate(rate)
        if torch.equal(before, _answers(model)):
            break
    return [source for source in inspection.chance(model) if not source.is_adapter]


def _answers(model: Any) -> torch.Tensor | None:
    """The logits of some tokens, without chance; None where this model cannot compute here."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        tokens = torch.arange(_TOKENS, device=device).unsqueeze(0) % model.config.get_text_config().vocab_size
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    except Exception:  # noqa: BLE001 - the model's own code: the training says it
        return None
    finally:
        model.train(was_training)
    return logits


def _listed(sources: Sequence[Chance]) -> str:
    """`attention_dropout = 0.1, resid_dropout.p = 0.1`, each name once."""
    return ", ".join(dict.fromkeys(f"{source.place.removesuffix('.p').rsplit('.', 1)[-1]} = {source.amount:g}" for source in sources))
