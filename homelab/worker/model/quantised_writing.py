"""Writing the quantised base that `quantised_cache` reads: piece by piece, while each of them is in memory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from homelab.shared.protocol import lock
from homelab.worker.errors import disk_fault, first_words, size_words
from homelab.worker.model import quantised_cache, weight_digests
from homelab.worker.model.pretrained import See
from homelab.worker.runtime.task import Task

_INDEX, _SUFFIX = "model.safetensors.index.json", ".safetensors"
_SPARE_BYTES = 2 * 10**9  # stays free for checkpoints and logs, because the cache is only for speed


@contextlib.contextmanager
def keeping(folder: Path | None, task: Task, note: Callable[[str], None], *, is_own: bool = False) -> Iterator[See]:
    """While a model is made, write the pieces that are seen to `folder` (None: nowhere), by one rank for each folder, where the disk has room. What was kept of the
    same model with other files or versions goes. Neither a full disk nor another training ends a training for it. `is_own`: no other rank of this node has this part.
    """
    if folder is None or not (task.is_keeper or is_own):
        yield lambda _piece, _more: None
        return
    writer = _Writer(folder, note)
    try:
        yield writer.add
        writer.finish()
    finally:
        writer.close()


class _Writer:
    """A base that is written, until it is whole or something is in the way, which is said."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._folder, self._note = folder, note
        self._partial: Path | None = None  # once this process has the lock
        self._locked = ExitStack()
        self._is_over = False
        self._held: dict[str, str] = {}
        self._sources: dict[str, str | None] = {}
        self._files: dict[str, str] = {}  # name of a tensor as it is saved -> its file
        self._bytes = 0

    def add(self, piece: Any, more: int) -> None:
        """Write a piece, where there is room for it and so many `more` of its size."""
        if self._is_over:
            return
        with self._forgiving():
            tensors, sources = quantised_cache.tensors_of(piece), weight_digests.sources(piece)
            size_bytes = sum(tensor.nbytes for tensor in tensors.values())
            partial = self._partial or self._begin() if all(sources.values()) else None
            if partial is None or not self._has_room(size_bytes * (1 + more)):
                self._is_over = True
                return
            self._save(piece, partial, flushes=more > 0 or self._bytes > 0)
            self._held |= weight_digests.each(tensors)
            self._sources |= sources
            self._bytes += size_bytes

    def finish(self) -> None:
        """The pieces that were added are all: from now on the base is there."""
        if self._is_over or self._partial is None:
            return
        with self._forgiving():
            (self._partial / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": self._files}), encoding="utf-8")
            made = {"held": self._held, "sources": self._sources}
            (self._partial / quantised_cache.MADE).write_text(json.dumps(made), encoding="utf-8")
            os.replace(self._partial, self._folder)
            self._note(f"base: quantised, and stored for the next start in {self._folder} ({size_words(self._bytes)})")
            quantised_cache.remove_surplus(self._folder)

    def close(self) -> None:
        """Nothing half written stays."""
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
        self._locked.close()

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the libraries that write have errors of their own
            self._is_over = True
            why = disk_fault(error, self._folder.parent) or first_words(error)
            self._note(f"the quantised base could not be stored in {self._folder}: {why}")

    def _begin(self) -> Path | None:
        """Take the lock and make room; the folder to write to. None where another training is at it."""
        folder = self._folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        is_mine = self._locked.enter_context(lock.without_waiting(quantised_cache.lock_of(folder)))
        if quantised_cache.is_stored(str(folder)):
            self._note(f"base: quantised; meanwhile another training has stored it in {folder}")
            return None
        if not is_mine:
            self._note(f"base: quantised, and not stored: another training uses {folder} at this moment")
            return None
        self._partial = folder.with_name(f".{folder.name}.partial")
        for left in (folder, self._partial):  # a damaged one, and that of a training that was killed
            shutil.rmtree(left, ignore_errors=True)
        quantised_cache.remove_other_files(folder)
        return self._partial

    def _has_room(self, size_bytes: int) -> bool:
        disk = self._folder.parent
        if shutil.disk_usage(disk).free < size_bytes + _SPARE_BYTES:
            quantised_cache.remove_all_others(self._folder)
        free_bytes = shutil.disk_usage(disk).free
        if free_bytes >= size_bytes + _SPARE_BYTES:
            return True
        self._note(f"the quantised base is not stored: it needs {size_words(size_bytes)}, and {size_words(free_bytes)} are free in {disk}")
        return False

    def _save(self, piece: Any, partial: Path, *, flushes: bool) -> None:
        """Into files beside those of the pieces before. `flushes`: they are on the disk afterwards, and not in memory: the pieces may be more than it holds."""
        from safetensors import safe_open

        folder = partial / "piece"
        piece.save_pretrained(folder)
        for file in sorted(folder.glob(f"*{_SUFFIX}")):
            place = partial / f"model-{len(set(self._files.values())):05}{_SUFFIX}"
            os.replace(file, place)
            with safe_open(place, "pt") as opened:
                self._files |= dict.fromkeys(opened.keys(), place.name)
            if flushes:
                with place.open("rb") as written:
                    os.fsync(written.fileno())
                    os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for file in () if self._bytes else folder.glob("*.json"):
            os.replace(file, partial / file.name)  # the configuration is that of the whole model
        shutil.rmtree(folder)
