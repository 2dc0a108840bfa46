"""Chooses the device for a chat with a trained model: its bytes against the free memory of the cards and of the machine.

Sizes of quantised weights: `homelab.shared.protocol.quantisation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from homelab.shared.law.stage import Stage
from homelab.shared.protocol import quantisation
from homelab.shared.protocol.errors import EXIT_NO_ROOM
from homelab.worker.errors import WorkerError

_GAPS = 1.05  # between the allocator's blocks


class NoRoom(WorkerError):
    """The model, or the stage of it that is asked for, does not fit on this node now."""

    exit_code = EXIT_NO_ROOM


@dataclass(frozen=True)
class RoomOnCard:
    """A card of this machine. `is_training`: a rank of the run that is asked computes on it now."""

    index: int
    name: str
    free_bytes: int
    is_training: bool = False


@dataclass(frozen=True)
class Place:
    """Where the model is loaded: the number of a card, or None for the CPU; `note` is for the person who asks.

    `room`: what the model needs, and what is free there, for the person who waits for it.
    """

    card: int | None
    note: str | None = None
    room: str = field(default="", compare=False)


def choose(needed_bytes: int | None, cards: Sequence[RoomOnCard], ram_bytes: int | None, *, run: str, model: str) -> Place:
    """The card with the most free memory if the model fits there, else the CPU if it fits into RAM.

    A size of None is unknown: then the model is tried. Raises NoRoom with both numbers when the model fits nowhere.
    """
    best = max(cards, key=lambda card: card.free_bytes, default=None)
    training = f"; the run trains on it now (homelab status {run})" if best and best.is_training else ""
    size = "it is not known how much memory it needs" if needed_bytes is None else f"it needs about {_gb(needed_bytes)}"
    if best and (needed_bytes is None or needed_bytes <= best.free_bytes):
        note = f"answered during the training: the run trains on card {best.index} now" if training else None
        return Place(best.index, note, f"{size}; card {best.index} ({best.name}) has {_gb(best.free_bytes)} free")
    room = f"{size}; RAM has {_gb(ram_bytes)} free" if ram_bytes is not None else size
    if needed_bytes is None:
        return Place(None, room=room)
    needs = f"the model needs about {_gb(needed_bytes)} to answer"
    on_card = f"card {best.index} ({best.name}) has {_gb(best.free_bytes)} free{training}" if best else "there is no card"
    if ram_bytes is None or needed_bytes <= ram_bytes:
        return Place(None, f"answered on the CPU, slowly: {needs}, and {on_card}" if best else None, room)
    if training:
        hint = f"ask again when the run is done, or end it first: homelab stop {run}"
    elif best:
        hint = "free the card (nvidia-smi names who holds it) or RAM (ps aux --sort=-rss | head), then ask again"
    else:
        hint = "free RAM on this node (ps aux --sort=-rss | head shows the programs that use it), then ask again"
    raise NoRoom(f"{needs}: {on_card}, and RAM has {_gb(ram_bytes)} free", where=model, hint=hint)


def answer_bytes(
    path: str, revision: str | None, *, quantisation: str | None, dtype: Any, tokens: int, added_bytes: int, stage: Stage | None = None
) -> int | None:
    """Bytes of the model at `path`, or of one stage of it, with its cache of `tokens` tokens, from its config alone; None where no model can be
    built of that.

    `quantisation`: of the base (`stored_weights.wanted`); `dtype`: of weights that are not quantised, None for that of the file. `added_bytes`: of the adapters. Two
    weights more, as large as the largest, are under way while it is loaded.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from homelab.worker.model import stored_experts, stored_weights

    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
        dtype = dtype or getattr(config, "dtype", None) or torch.float32
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            if stored_weights.leaves_experts(stored_weights.of(config), quantisation):
                stored_experts.install(model)
        text = config.get_text_config()
        layers = text.num_hidden_layers
        if stage is not None:
            from homelab.worker.strategies.pipeline import stage_model

            stage_model.cut(model, stage, dtype)
            layers = stage.end - stage.begin
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        cache = 2 * layers * heads * width * tokens * dtype.itemsize
    except Exception:  # noqa: BLE001 - an unknown kind of model: transformers reports the error when it loads the weights
        return None
    largest = max((parameter.numel() for parameter in model.parameters()), default=0) * dtype.itemsize
    return int(_GAPS * (weight_bytes(model, quantisation) + cache + added_bytes + 2 * largest))


def stored_dtype(path: str, revision: str | None) -> Any:
    """The type in which the files say that they have the weights; fp32 where they do not say."""
    import torch
    from transformers import AutoConfig

    from homelab.worker.model.pretrained import from_pretrained

    return getattr(from_pretrained(AutoConfig, path, revision=revision), "dtype", None) or torch.float32


def weight_bytes(model: Any, how: str | None) -> float:
    """Bytes of the weights; quantised ones are all linear layers but the head, and in 4 bits the routed experts. In MXFP4 these are as they are."""
    import torch

    from homelab.worker.model import fused_experts

    head, held = model.get_output_embeddings(), set()
    how = None if how == quantisation.MXFP4 else how
    for part in model.modules() if how is not None else ():
        if isinstance(part, torch.nn.Linear) and part is not head:
            held.add(id(part.weight))
        elif how == quantisation.NF4 and fused_experts.fits(part):
            held |= {id(weight) for weight in part.parameters()}
    packed: float = sum(buffer.nbytes for buffer in model.buffers() if buffer.dtype == torch.uint8)
    return packed + sum(
        parameter.shape[:-2].numel() * quantisation.matrix_bytes(how, *parameter.shape[-2:])
        if how is not None and id(parameter) in held
        else float(parameter.numel() * parameter.itemsize)
        for parameter in model.parameters()
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
