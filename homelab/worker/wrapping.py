"""How DistributedDataParallel wraps the model: accelerate's settings, and those of torch that accelerate has no name for."""

from __future__ import annotations

import dataclasses

from accelerate.utils import DistributedDataParallelKwargs


@dataclasses.dataclass
class Wrapping(DistributedDataParallelKwargs):
    """In place of accelerate's own handler, which hands on only the fields that it knows (accelerate/utils/dataclasses.py, to_kwargs: all
    that differ from the class's defaults)."""

    init_sync: bool = True  # torch's default: rank 0 sends every weight, frozen ones too, to all others

    @classmethod
    def of(cls, handler: DistributedDataParallelKwargs) -> Wrapping:
        """What `handler` says, and no weight is sent: `copies` compares them."""
        said = {field.name: getattr(handler, field.name) for field in dataclasses.fields(handler)}
        return cls(**{**said, "init_sync": False})
