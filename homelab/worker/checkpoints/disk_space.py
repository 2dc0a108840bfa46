"""Room for one more checkpoint: checked before the write, and made by removing old checkpoints where that is allowed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from homelab.shared.protocol import manifest
from homelab.worker.checkpoints import checkpoint_folder, held
from homelab.worker.errors import size_words

# Bytes beside the tensors: the headers of the archive, the manifest, the folder.
MARGIN_BYTES = 1 << 20


def make(root: Path, step: int, needed_bytes: int, keep: int, is_kept: Callable[[int], bool] = lambda step: False) -> None:
    """Make sure that the checkpoint of `step` with `needed_bytes` fits on the disk of `root`; `keep` and `is_kept` are those of [checkpoint].

    Where it does not, evidence goes first, then, oldest first, what retention would remove once it is written; the newest whole one
    stays. Raises WorkerError with needed and free bytes, in the words of a full disk, where that is not enough.
    """
    root.mkdir(parents=True, exist_ok=True)
    needed_bytes += MARGIN_BYTES
    if _free_bytes(root) >= needed_bytes:
        return
    manifest.clear_corrupt(root)
    held.take_back(root, unless_read=False)
    # A checkpoint that is being replaced stays until its successor is whole.
    others = sum(saved_step < step for saved_step in checkpoint_folder.complete_steps(root))
    for left in range(others - 1, max(keep - 1, 1) - 1, -1):
        if _free_bytes(root) >= needed_bytes:
            return
        checkpoint_folder.retain(root, left, newest=step - 1, is_kept=is_kept)
    free_bytes = _free_bytes(root)
    if free_bytes < needed_bytes:
        why = f"{os.strerror(errno.ENOSPC)} (it needs {size_words(needed_bytes)}, {size_words(free_bytes)} are free)"
        raise checkpoint_folder.unwritable(root, step, why)


def of_state(state: Any) -> int:
    """Bytes of the tensors in what a strategy saves: of the trained weights, and of what the optimizer keeps for them."""
    return sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))


def _free_bytes(root: Path) -> int:
    return shutil.disk_usage(root).free
