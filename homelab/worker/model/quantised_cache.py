"""The cache of the quantised (NF4) base on this node's disk: made once, read at every later start (for 7B: 3.9 GB instead of 13.5 GB).

<workdir>/bases/<model>-nf4-<key>/ is what transformers saves of a quantised model, with made.json: the digest of what was held when it was
made, and of what every matrix was before (`digests.base` compares the nodes by those). The key stands for the source's files, the settings
and the versions that quantise. It is written beside and renamed; what is loaded from it and is not what was held then is removed and made
anew. So these are the same bits as without it, for any number of starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from homelab.shared.protocol.digest import sampled
from homelab.worker.errors import size_words
from homelab.worker.model import weight_digests
from homelab.worker.runtime.task import Task

_MADE = "made.json"
_SPARE_BYTES = 2 * 10**9  # stays free for checkpoints and logs, because the cache is only for speed
_SETTINGS = "nf4, double, blocks of 64, every expert alone"


def folder_of(task: Task, path: str, dtype: torch.dtype) -> Path | None:
    """Where the quantised base of this model lies on this node, whether it is there or not. None where its source is not on the disk yet."""
    source = Path(path)
    if importlib.util.find_spec("bitsandbytes") is None:
        return None  # the loader raises the error
    if not source.is_dir():
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(path, "config.json", revision=task.model.revision)
        if not isinstance(config, str):
            return None
        source = Path(config).parent
    made_of = [_SETTINGS, str(dtype), *(f"{name} {importlib.metadata.version(name)}" for name in ("bitsandbytes", "transformers"))]
    for file in sorted(source.iterdir()):
        if file.name == "config.json" or file.suffix in (".safetensors", ".bin"):
            status = file.stat()
            # As in the agent's digests: a file is the same while its size, time of change and inode are the same.
            made_of.append(f"{file.name} {status.st_mtime_ns} {status.st_ino} {sampled(str(file), status.st_size)}")
    key = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
    return task.run_dir.parent.parent / "bases" / f"{_stem(task)}{key}"


def is_stored(path: str) -> bool:
    """Whether this folder is a quantised base that homelab made."""
    return (Path(path) / _MADE).is_file()


def load(folder: Path, make: Callable[[], Any], note: Callable[[str], None]) -> Any:
    """The model that `make` loads from `folder` when it is bit for bit the saved one; otherwise the folder is removed and the result is None."""
    if not is_stored(str(folder)):
        return None
    try:
        made = json.loads((folder / _MADE).read_text(encoding="utf-8"))
        model = make()
        if _held(model) != made["held"]:
            raise ValueError("its digest has changed since it was made")
        weight_digests.put_sources(model, made["sources"])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged file can raise any error in its readers
        note(
            f"the quantised base in {folder} is damaged and is made again: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )
        shutil.rmtree(folder, ignore_errors=True)
        return None
    note(f"base: quantised before, read from {folder}")
    return model


def keep(model: Any, folder: Path, task: Task, note: Callable[[str], None]) -> None:
    """Write the quantised `model` to `folder`, by the first rank of the node, where the disk has room. What was kept of the same model
    with other files or versions goes. A full disk must not end a training for it.
    """
    sources = weight_digests.sources(model)
    if task.local_rank != 0 or not all(sources.values()):
        return
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for other in folder.parent.iterdir():
            if other.name.lstrip(".").startswith(_stem(task)):
                shutil.rmtree(other, ignore_errors=True)
        needed_bytes, free_bytes = sum(tensor.nbytes for tensor in _tensors(model).values()), shutil.disk_usage(folder.parent).free
        if free_bytes < needed_bytes + _SPARE_BYTES:
            note(
                f"the quantised base is not stored: it needs {size_words(needed_bytes)}, and {size_words(free_bytes)} are free in {folder.parent}"
            )
            return
        model.save_pretrained(partial)
        (partial / _MADE).write_text(json.dumps({"held": _held(model), "sources": sources}), encoding="utf-8")
        os.replace(partial, folder)
        note(f"base: quantised, and stored for the next start in {folder} ({size_words(needed_bytes)})")
    except OSError as error:
        note(f"the quantised base could not be stored in {folder}: {error.strerror or error}")
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(partial)


def _stem(task: Task) -> str:
    last = task.model.name.rstrip("/").rsplit("/", 1)[-1].lower()
    return (re.sub(r"[^a-z0-9._-]+", "-", last) or "model") + "-nf4-"


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def _held(model: Any) -> str:
    return weight_digests.joined(weight_digests.each(_tensors(model)))
