"""The optimizer's state as a checkpoint has it, read so that the card never holds more of it than it does while training.

The Trainer reads it onto the card where there are several ranks (trainer.py, _load_optimizer_and_scheduler), beside the copy that is
made of it. And bitsandbytes 0.50, which makes large state of its paged optimizers in memory that may leave the card (optim/optimizer.py,
get_state_buffer), puts what it loads on the card for good (load_state_dict, `v.to(param.device)`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_HOW = ("fused", "foreach", "capturable")  # of torch's optimizers: which kernels a step uses
_PAGED_ELEMENTS = 100_000  # of a parameter whose state is paged: get_state_buffer


def load(optimizer: Any, path: Path, device: torch.device) -> None:
    """Read the file into `optimizer`, which computes on `device`. In a card's case straight from the disk, without a copy in RAM."""
    is_card = device.type == "cuda"
    state = read(optimizer, path, is_mapped=is_card)
    if is_card and getattr(optimizer, "is_paged", False):
        load_paged(optimizer, state)
        return
    optimizer.load_state_dict(state)
    if is_card:
        # Copy the step counters into RAM. Mapped pages of the file would keep its disk space in use after it is removed.
        for values in optimizer.state.values():
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                    values[name] = value.clone()


@contextlib.contextmanager
def kept_as_made(optimizer: Any, scheduler: Any, *, is_asked: bool = True) -> Iterator[None]:
    """Around the loading of both: where it `is_asked`, rates, decay and all else that the recipe decides stay as they were made from it. Only the state
    is loaded.

    `scheduler`: a LambdaLR.
    """
    own = [{name: value for name, value in group.items() if name not in ("params", "lr")} for group in optimizer.param_groups]
    rates = list(scheduler.base_lrs)
    yield
    if not is_asked:
        return
    scheduler.base_lrs = rates
    factors = [factor_of(scheduler.last_epoch) for factor_of in scheduler.lr_lambdas]
    for group, decided, rate, factor in zip(optimizer.param_groups, own, rates, factors, strict=True):
        group.update({**decided, "lr": rate * factor})
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def load_own(optimizer: Any, state: dict[str, Any], device: torch.device) -> None:
    """Load what is this rank's of a state that was read from a file (its tensors are pages of it)."""
    for now, then in zip(optimizer.param_groups, state["param_groups"], strict=True):
        then.update({name: now[name] for name in _HOW if name in now})
    state = {**state, "state": tree_map_only(torch.Tensor, torch.clone, state["state"])}
    if device.type == "cuda" and getattr(optimizer, "is_paged", False):
        load_paged(optimizer, state)
        return
    optimizer.load_state_dict(state)


def read(optimizer: Any, path: Path, *, is_mapped: bool) -> dict[str, Any]:
    """The state in the file, for the kernels that `optimizer` uses. `is_mapped`: the tensors are pages of the file."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=is_mapped, weights_only=True)
    # Not those of the attempt that saved it: they decide where a counter lies and the memory of a step.
    for now, then in zip(optimizer.param_groups, state["param_groups"], strict=True):
        then.update({name: now[name] for name in _HOW if name in now})
    return state


def load_paged(optimizer: Any, state: dict[str, Any]) -> None:
    """Load like the optimizer's `load_state_dict`, but put the large tensors into paged memory, as the optimizer itself does."""
    from bitsandbytes import functional

    optimizer.load_state_dict(state, move_to_device=False)
    for parameter, values in optimizer.state.items():
        for name in optimizer.non_castable_tensor_keys & values.keys():
            value = values[name].detach()  # without the mark of a page, which the saved tensor may have
            if name in ("state1", "state2") and parameter.numel() >= _PAGED_ELEMENTS:
                values[name] = functional.get_paged(*value.shape, dtype=value.dtype, device=parameter.device).copy_(value)
                optimizer.page_mng.paged_tensors.append(values[name])
            else:
                values[name] = value.to(parameter.device)
