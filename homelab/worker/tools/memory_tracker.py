"""Follows every storage, real or fake, from its allocation to its release: live bytes, the peak, the operation at the peak, its composition.

A storage counts once, however many tensors share it. Memory that a kernel allocates and frees internally is not counted. The kinds are those of `homelab plan`'s itemised estimate.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from homelab.shared.protocol.memory_items import ACTIVATIONS, ADAPTERS, BASE_WEIGHTS, CASTED_WEIGHTS, DEQUANTISATION, LOGITS


class Tracker(TorchDispatchMode):
    """Counts bytes of storages that are made inside, and of those that `hold` names. `kind` names what is made next."""

    active: Tracker | None = None

    def __init__(self, vocabulary: int, *, rounding_bytes: int = 1) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.rounding_bytes = rounding_bytes
        self.kind = ACTIVATIONS
        self.live_bytes = 0
        self.peak_bytes = 0
        self.at = ""
        self.items: dict[str, int] = {}
        self._by_kind: dict[str, int] = {}
        self._known: dict[int, tuple[str, Any]] = {}
        self._forced: str | None = None

    def __enter__(self) -> Tracker:
        Tracker.active = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        Tracker.active = None
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._known:
                    self._add(storage, self._forced or self._kind_of(leaf, function, args), str(function))
        return result

    @contextlib.contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """Count every allocation inside as this kind."""
        before, self._forced = self._forced, kind
        try:
            yield
        finally:
            self._forced = before

    def hold(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Count storages that exist already."""
        for tensor in tensors:
            self._add(tensor.untyped_storage(), kind, "")

    def _kind_of(self, tensor: torch.Tensor, function: Any, args: Any) -> str:
        name = str(function)
        if "dequantize" in name:
            return DEQUANTISATION
        if tensor.dim() >= 2 and tensor.shape[-1] == self.vocabulary:
            return LOGITS
        if name.startswith("aten._to_copy") and isinstance(args[0], torch.Tensor) and args[0].numel() == tensor.numel():
            source = self._known.get(args[0].untyped_storage()._cdata)
            if source and args[0].dtype == torch.int8:
                return DEQUANTISATION
            if source and source[0] in (BASE_WEIGHTS, ADAPTERS):
                return CASTED_WEIGHTS
        return self.kind

    def _add(self, storage: Any, kind: str, at: str) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = -(-storage.nbytes() // self.rounding_bytes) * self.rounding_bytes

        def gone(_: object) -> None:
            self._known.pop(key, None)
            self.live_bytes -= size
            self._by_kind[kind] -= size

        self._known[key] = (kind, weakref.ref(storage, gone))
        self.live_bytes += size
        self._by_kind[kind] = self._by_kind.get(kind, 0) + size
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.at, self.items = self.live_bytes, at, dict(self._by_kind)
