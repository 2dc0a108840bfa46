"""The quantised layers of a model that no rank has whole, each a file of its own on this node's disk: any cut reads those that it needs.

<workdir>/bases/<model>-nf4-<key>-layers-<dtype>/ has of each layer what transformers saves of a model with this layer alone, and beside it the digest of
each of its tensors, and of what its matrices were. The key and the rest are as in `quantised_cache`. What stands before and behind the layers is not
quantised, and comes from the model's own files.

A layer is written, or compared, while it is in memory: those of a model that is streamed are not there together. A file appears whole or not at all, so
that several ranks and trainings may read and add; who removes the folder has its lock alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from homelab.shared.protocol import lock
from homelab.worker.errors import disk_fault, first_words, size_words
from homelab.worker.model import quantised_cache, weight_digests

PART = "layers"  # in the name of the folder
_PARTIAL, _STALE_S = ".partial-", 3600.0
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)  # a full disk for temporary files says nothing of a layer
_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"


class KeptLayers:
    """Those of one load. `adds`: whether this rank writes what is not there."""

    def __init__(self, folder: Path, note: Callable[[str], None], *, adds: bool) -> None:
        self._folder, self._note = folder, note
        self._adds, self._is_used = adds, False
        self._added_bytes, self._added, self._read = 0, 0, 0

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Around a load: nobody removes the folder meanwhile. What was read and added is said at the end."""
        with ExitStack() as locked:
            try:
                self._folder.parent.mkdir(parents=True, exist_ok=True)
                is_mine = locked.enter_context(lock.without_waiting(quantised_cache.lock_of(self._folder), shared=True))
            except OSError as error:
                self._note(f"quantised layers in {self._folder} are not used: {error.strerror or error}")
                is_mine = False
            self._is_used = is_mine
            yield
        if self._read:
            self._note(f"base: {self._read} layers quantised before, read from {self._folder}")
        if self._added:
            size = size_words(self._added_bytes)
            self._note(f"base: {self._added} layers quantised, and stored for the next start in {self._folder} ({size})")

    def there(self, layers: Collection[int]) -> frozenset[int]:
        """Those of these layers that were kept."""
        return frozenset(layer for layer in layers if self._is_used and self._facts(layer).is_file())

    @contextlib.contextmanager
    def as_model(self, layers: Collection[int]) -> Iterator[str]:
        """A model's folder with these layers alone."""
        with tempfile.TemporaryDirectory(prefix="homelab-layers-") as view:
            os.symlink(self._folder / _CONFIG, Path(view, _CONFIG))
            files: dict[str, str] = {}
            for layer in layers:
                os.symlink(self._weights(layer), Path(view, self._weights(layer).name))
                files |= dict.fromkeys(json.loads(self._facts(layer).read_text(encoding="utf-8"))["names"], self._weights(layer).name)
            Path(view, _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8")
            yield view

    def compare(self, model: Any, layers: Collection[int]) -> None:
        """Give the matrices of these layers the digests of what they were. Raises ValueError or KeyError where a tensor is not the one that was kept."""
        held: dict[str, str] = {}
        sources: dict[str, str] = {}
        for layer in layers:
            facts = json.loads(self._facts(layer).read_text(encoding="utf-8"))
            held, sources = held | facts["held"], sources | facts["sources"]
        if weight_digests.each(quantised_cache.tensors_of(model)) != held:
            raise ValueError("its digest has changed since it was made")
        weight_digests.put_sources(model, sources)
        self._read += len(layers)

    def forget(self, layers: Collection[int], error: Exception) -> None:
        """They cannot be read, because of this error, and are made again. Where the machine is at fault, none is used in this load, and none goes."""
        self._read = 0
        if getattr(error, "errno", None) in _OF_THE_MACHINE:
            self._is_used = False
            self._note(f"quantised layers in {self._folder} are not used: {first_words(error)}")
            return
        self._note(f"quantised layers in {self._folder} are damaged and are made again: {first_words(error)}")
        try:
            for layer in layers:
                self._facts(layer).unlink(missing_ok=True)
        except OSError:  # another account's: they stay, and must not be tried for ever
            self._is_used = False

    def add(self, model: Any, layer: int, *, room_for: int = 0, flushes: bool = False) -> None:
        """Keep the one layer that `model` has, where the disk takes it and `room_for` blocks of its size beside it. A disk that is full ends no training.

        `flushes`: it is on the disk afterwards, and in no memory: all layers may be more than that holds.
        """
        sources = weight_digests.sources(model)
        if not (self._adds and self._is_used and sources and all(sources.values())):
            return
        try:
            tensors = quantised_cache.tensors_of(model)
            size_bytes = sum(tensor.nbytes for tensor in tensors.values())
            if not self._added:
                quantised_cache.remove_other_files(self._folder)
            if not quantised_cache.has_room(self._folder, size_bytes * (1 + room_for), self._note):
                self._adds = False
                return
            facts = {"held": weight_digests.each(tensors), "sources": sources}
            self._write(model, layer, facts, flushes=flushes)
            self._added, self._added_bytes = self._added + 1, self._added_bytes + size_bytes
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the libraries that write have errors of their own
            self._adds = False
            why = disk_fault(error, self._folder.parent) or first_words(error)
            self._note(f"quantised layers could not be stored in {self._folder}: {why}")

    def _write(self, model: Any, layer: int, facts: dict[str, Any], *, flushes: bool) -> None:
        from safetensors import safe_open

        self._folder.mkdir(exist_ok=True)
        for left in sorted(self._folder.glob(f"{_PARTIAL}*")):  # of a training that was killed
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self._folder))
        try:
            model.save_pretrained(partial)
            (file,) = sorted(partial.glob("*.safetensors"))
            with safe_open(file, "pt") as opened:
                facts["names"] = list(opened.keys())
            if flushes:
                with file.open("rb") as written:
                    os.fsync(written.fileno())
                    os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            (partial / "facts").write_text(json.dumps(facts), encoding="utf-8")
            os.replace(partial / _CONFIG, self._folder / _CONFIG)
            os.replace(file, self._weights(layer))
            os.replace(partial / "facts", self._facts(layer))
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _weights(self, layer: int) -> Path:
        return self._folder / f"layer-{layer:05}.safetensors"

    def _facts(self, layer: int) -> Path:
        return self._folder / f"layer-{layer:05}.json"
