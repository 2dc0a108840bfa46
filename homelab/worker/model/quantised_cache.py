"""The cache of the quantised (NF4) base on this node's disk: made once, read at every later start (for 7B: 3.9 GB instead of 13.5 GB).

<workdir>/bases/<model>-nf4-<key>-<part><dtype>/ is what transformers saves of a quantised model, whole or the layers of one stage of a pipeline, with
made.json: the digest of each tensor that was held when it was made, and of what every matrix was before (`digests.base` compares the nodes by those).
The key stands for the source's files, the settings and the versions that quantise. It is written beside and renamed; what is loaded from it and is
not what was held then is made anew. So these are the same bits as without it, for any number of starts.

Layers that are streamed come one by one, as no two of them need to be in memory together: each is written, or compared, while it is there.

Several trainings may use the folder at once. Who writes or removes a base has its lock alone (.<name of the base>.lock), and who reads it shares
the lock. Nobody waits: without the lock, a training quantises for itself. A lock ends with its process, also one of another machine that shares
the folder; a pid would say nothing there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from homelab.shared.protocol import lock
from homelab.shared.protocol.digest import sampled
from homelab.shared.recipe import Model
from homelab.worker.model import weight_digests
from homelab.worker.model.pretrained import See

MADE, _NF4 = "made.json", "-nf4-"
_SETTINGS = "nf4, double, blocks of 64, every expert alone, a digest for each tensor"
_MOST = 4  # bases of one model: two cuts of a node with two cards. A node that comes back brings the cut of before
# What stands around a base's name: its lock, and what is half written; with a pid where an older homelab wrote it.
_AROUND = re.compile(r"^\.|(\.\d+)?\.partial$|\.lock$")


def folder_of(run_dir: Path, model: Model, path: str, dtype: torch.dtype, part: str = "") -> Path | None:
    """Where the quantised base of this model lies on this node, or this part of it, whether it is there or not. None where its source is not on
    the disk yet."""
    source = Path(path)
    if importlib.util.find_spec("bitsandbytes") is None:
        return None  # the loader raises the error
    if not source.is_dir():
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(path, "config.json", revision=model.revision)
        if not isinstance(config, str):
            return None
        source = Path(config).parent
    made_of = [_SETTINGS, *(f"{name} {importlib.metadata.version(name)}" for name in ("bitsandbytes", "transformers"))]
    for file in sorted(source.iterdir()):
        if file.name == "config.json" or file.suffix in (".safetensors", ".bin"):
            status = file.stat()
            # As in the agent's digests: a file is the same while its size, time of change and inode are the same.
            made_of.append(f"{file.name} {status.st_mtime_ns} {status.st_ino} {sampled(str(file), status.st_size)}")
    key = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
    last = model.name.rstrip("/").rsplit("/", 1)[-1].lower()
    stem = re.sub(r"[^a-z0-9._-]+", "-", last) or "model"
    return run_dir.parent.parent / "bases" / f"{stem}{_NF4}{key}-{part}{'-' if part else ''}{str(dtype).removeprefix('torch.')}"


def is_stored(path: str) -> bool:
    """Whether this folder is a quantised base that homelab made."""
    return (Path(path) / MADE).is_file()


def load(folder: Path | None, read: Callable[..., Any], reader: Callable[..., Any] | None, note: Callable[[str], None]) -> Any:
    """The model that is loaded from `folder` (`shown`) when each of its pieces is bit for bit the saved one; otherwise the result is None, and
    `quantised_writing.keeping` replaces what is there. `read` gets the folder in the place of a model's name, and no revision."""
    if folder is None or not is_stored(str(folder)):
        return None
    try:
        with lock.without_waiting(lock_of(folder), shared=True) as is_mine:
            return _read(folder, functools.partial(read, str(folder), None), reader, note) if is_mine else None
    except OSError as error:
        note(f"the quantised base in {folder} is not used: {error.strerror or error}")
        return None


def shown(read: Callable[..., Any], reader: Callable[..., Any] | None, see: See) -> Any:
    """What `read` makes, as `build.load_base` does, with this `reader`, after each of its pieces was shown to `see`."""
    if reader is not None:
        return read(reader=functools.partial(reader, see=see))
    model = read()
    see(model, 0)
    return model


def _read(folder: Path, read: Callable[..., Any], reader: Callable[..., Any] | None, note: Callable[[str], None]) -> Any:
    try:
        made = json.loads((folder / MADE).read_text(encoding="utf-8"))
        model = shown(read, reader, functools.partial(_compare, made))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged file can raise any error in its readers
        note(
            f"the quantised base in {folder} is damaged and is made again: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )
        (folder / MADE).unlink(missing_ok=True)  # it is not whole; its files stay for those who read them at this moment
        return None
    with contextlib.suppress(OSError):
        os.utime(folder / MADE)  # the one that was used last is the last to go
    note(f"base: quantised before, read from {folder}")
    return model


def _compare(made: Mapping[str, Any], piece: Any, _more: int) -> None:
    """Raises ValueError or KeyError where a piece is not what was saved."""
    if any(made["held"][name] != digest for name, digest in weight_digests.each(tensors_of(piece)).items()):
        raise ValueError("its digest has changed since it was made")
    weight_digests.put_sources(piece, made["sources"])


def remove_other_files(folder: Path) -> None:
    """Remove what is kept of this model with other files or versions, unless another training reads or writes it."""
    _remove(folder, lambda name: not name.startswith(_same_files(folder)))


def remove_all_others(folder: Path) -> None:
    """Remove the bases of this model in other precisions and of other stages, too."""
    _remove(folder, lambda name: name != folder.name)


def remove_surplus(folder: Path) -> None:
    """Of the same files, those that were used last stay."""
    made = [path for path in folder.parent.glob(f"*/{MADE}") if path.parent.name.startswith(_same_files(folder))]
    surplus = {path.parent.name for path in sorted(made, key=lambda path: path.stat().st_mtime, reverse=True)[_MOST:]}
    _remove(folder, lambda name: name in surplus)


def _remove(folder: Path, goes: Callable[[str], bool]) -> None:
    for name in sorted({_AROUND.sub("", path.name) for path in folder.parent.iterdir()}):
        if not name.startswith(_stem(folder)) or not goes(name):
            continue
        other = folder.with_name(name)
        with lock.without_waiting(lock_of(other)) as is_mine:
            if is_mine:
                for left in (other, *sorted(folder.parent.glob(f".{name}.*partial"))):
                    shutil.rmtree(left, ignore_errors=True)
                lock_of(other).unlink(missing_ok=True)


def lock_of(folder: Path) -> Path:
    """The file whose lock says who uses a base."""
    return folder.with_name(f".{folder.name}.lock")


def tensors_of(piece: Any) -> dict[str, torch.Tensor]:
    """What a model, or a piece of it, holds and saves, by name."""
    return {name: value for name, value in piece.state_dict().items() if isinstance(value, torch.Tensor)}


def _stem(folder: Path) -> str:
    """With what the names of all bases of a model begin."""
    return folder.name[: folder.name.rindex(_NF4)] + _NF4


def _same_files(folder: Path) -> str:
    """With what those begin that are made of the same files."""
    stem = _stem(folder)
    return f"{stem}{folder.name.removeprefix(stem).partition('-')[0]}-"
