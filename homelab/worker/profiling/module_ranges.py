"""A range in the trace around the forward of every module of a model, so that each operator has the module that called it.

Much cheaper than Python stacks (`with_stack` of torch.profiler), and it names what a person has written: `model.layers.2.mlp`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd.profiler import record_function

from homelab.shared.protocol import profile_files


class ModuleRanges:
    """The hooks of one model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []

    def add(self) -> None:
        """From now on every forward is a range. A forward that ends early (checkpointing does so when it computes one again) closes it, too."""
        for path, module in self._model.named_modules():
            if path:
                self._hook(module, profile_files.MODULE + path)

    def _hook(self, module: torch.nn.Module, name: str) -> None:
        open_ranges: list[Any] = []

        def begin(*_args: Any) -> None:
            entered = record_function(name)
            entered.__enter__()
            open_ranges.append(entered)

        def end(*_args: Any) -> None:
            if open_ranges:
                open_ranges.pop().__exit__(None, None, None)

        self._handles.append(module.register_forward_pre_hook(begin, prepend=True))
        self._handles.append(module.register_forward_hook(end, always_call=True))

    def remove(self) -> None:
        """No range any more."""
        while self._handles:
            self._handles.pop().remove()

    def sources(self) -> Mapping[str, tuple[str, str]]:
        """Path -> (class, "file.py:line" of its forward, "" where it has none)."""
        # fully_shard makes a class of its own, FSDP and the name.
        return {path: (type(module).__name__.removeprefix("FSDP"), _place(module)) for path, module in self._model.named_modules() if path}


def _place(module: torch.nn.Module) -> str:
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}" if code else ""
