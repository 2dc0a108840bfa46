"""One rank of a real training whose every storage is followed through its first two steps.

python -m benchmarks.shards.rank FILE: the worker, which writes {"start_bytes", "peak_bytes", "at"} into FILE.RANK before anything is saved.
A storage counts once, however many tensors share it, and with the bytes that it has just now: `fully_shard` empties and fills its own
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py). Memory that a kernel allocates and frees by itself is not counted.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from homelab.worker.training.run import Run
from homelab.worker.training.train import main

_STEPS = 2


class Storages(TorchDispatchMode):
    """Live bytes of all storages that are made inside or were told of."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.at = ""
        self._sizes: dict[int, int] = {}
        self._ends: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf, str(function))
        return result

    def see(self, tensor: torch.Tensor, at: str = "") -> None:
        """Count the storage of this tensor, as large as it is now."""
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            self._ends[key] = weakref.ref(storage, lambda _: self._set(key, None, ""))
        self._set(key, size, at)

    def _set(self, key: int, size: int | None, at: str) -> None:
        self.live_bytes += (size or 0) - self._sizes.pop(key, 0)
        if size is None:
            self._ends.pop(key, None)
            return
        self._sizes[key] = size
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.at = self.live_bytes, at


def follow_resizes(storages: Storages) -> None:
    """Hear of every storage that `fully_shard` empties or fills."""

    def followed(change: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        def changed(tensor: torch.Tensor) -> None:
            change(tensor)
            storages.see(tensor, change.__name__)

        return changed

    _fsdp_param.alloc_storage = followed(_fsdp_param.alloc_storage)
    _fsdp_param.free_storage = followed(_fsdp_param.free_storage)
    _fsdp_param_group.alloc_storage = _fsdp_param.alloc_storage


def measure(file: Path) -> None:
    """Have the next run in this process write what it holds."""
    storages = Storages()
    before_first, after_step = Run._before_first, Run._after_step
    start_bytes = 0

    def begin(run: Run, trainer: Any) -> None:
        nonlocal start_bytes
        before_first(run, trainer)
        gc.collect()
        for thing in gc.get_objects():
            if isinstance(thing, torch.Tensor) and thing.device.type != "meta" and not isinstance(thing, torch._subclasses.FakeTensor):
                storages.see(thing)
        for weight in trainer.model.parameters():
            for tensor in (weight.data, weight.grad):
                if tensor is not None:
                    storages.see(tensor)
        start_bytes = storages.live_bytes
        follow_resizes(storages)
        storages.__enter__()

    def end(run: Run, trainer: Any) -> None:
        if trainer.state.global_step == _STEPS:
            storages.__exit__(None, None, None)
            content = {"start_bytes": start_bytes, "peak_bytes": storages.peak_bytes, "at": storages.at}
            file.with_name(f"{file.name}.{os.environ['RANK']}").write_text(json.dumps(content))
        after_step(run, trainer)

    Run._before_first, Run._after_step = begin, end  # type: ignore[method-assign]


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
    code = main()
    sys.stdout.flush()
    os._exit(code)
