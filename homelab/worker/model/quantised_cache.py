"""The cache of the quantised (NF4) base on this node's disk: made once, read at every later start (for 7B: 3.9 GB instead of 13.5 GB).

<workdir>/bases/<model>-nf4-<key>-<dtype>/ is what transformers saves of a quantised model, with made.json: the digest of what was held when it
was made, of what every matrix was before (`digests.base` compares the nodes by those), and which device has quantised it. The key stands for the source's files, the settings
and the versions that quantise. It is written beside and renamed; what is loaded from it and is not what was held then is made anew. So these
are the same bits as without it, for any number of starts, also for a rank with another card than the one that kept it. Layers of a model that no node has whole: `kept_layers`.

Several trainings may use the folder at once. Who writes or removes a base has its lock alone (.<name of the base>.lock), and who reads it shares
the lock. Nobody waits: without the lock, a training quantises for itself. A lock ends with its process, also one of another machine that shares
the folder; a pid would say nothing there.
"""

from __future__ import annotations

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

from homelab.shared.protocol import files, lock
from homelab.shared.protocol.digest import sampled
from homelab.shared.recipe import Model
from homelab.worker.errors import disk_fault, first_words, size_words
from homelab.worker.model import weight_digests
from homelab.worker.runtime.task import Task

_MADE, _NF4 = "made.json", "-nf4-"
_SPARE_BYTES = 2 * 10**9  # stays free for checkpoints and logs, because the cache is only for speed
_SETTINGS = "nf4, double, blocks of 64, every expert alone"
# What stands around a base's name: its lock, and what is half written; with a pid where an older homelab wrote it.
_AROUND = re.compile(r"^\.|(\.\d+)?\.partial$|\.lock$")


def folder_of(run_dir: Path, model: Model, path: str, dtype: torch.dtype, part: str = "") -> Path | None:
    """Where the quantised base of this model lies on this node, or a `part` of it, whether it is there or not. None where its source is not on the disk
    yet."""
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
    return (Path(path) / _MADE).is_file()


def device_of(card: int | None) -> str:
    """What quantises: unlike cards may round to other codes (`weight_digests.base`)."""
    if card is None:
        return "cpu"
    properties = torch.cuda.get_device_properties(card)
    return f"{properties.name}, {properties.multi_processor_count} multiprocessors"


def load(folder: Path | None, path: str, read: Callable[[str, None], Any], note: Callable[[str], None], by: str | None = None) -> Any:
    """The model that `read` loads from `folder` in the place of its source, `path`, when it is bit for bit the saved one; otherwise the result is None, and `keep`
    replaces what is there. `read` gets no revision. `by`: only what this device has quantised, None: whichever has.
    """
    if folder is None or not is_stored(str(folder)):
        return None
    try:
        with lock.without_waiting(lock_of(folder), shared=True) as is_mine:
            model = _read(folder, read, note, by) if is_mine else None
    except OSError as error:
        note(f"the quantised base in {folder} is not used: {error.strerror or error}")
        return None
    if model is not None:  # adapters write down whose they are
        model.name_or_path = model.config._name_or_path = path
    return model


def _read(folder: Path, read: Callable[[str, None], Any], note: Callable[[str], None], by: str | None) -> Any:
    try:
        made = json.loads((folder / _MADE).read_text(encoding="utf-8"))
        if by is not None and made.get("by", "cpu") != by:  # an older homelab did not say it
            note(f"the quantised base in {folder} is not used: it is not known to be made by {by}")
            return None
        model = read(str(folder), None)
        if _held(model) != made["held"]:
            raise ValueError("its digest has changed since it was made")
        weight_digests.put_sources(model, made["sources"])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged file can raise any error in its readers
        note(
            f"the quantised base in {folder} is damaged and is made again: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )
        (folder / _MADE).unlink(missing_ok=True)  # it is not whole; its files stay for those who read them at this moment
        return None
    note(f"base: quantised before, read from {folder}")
    return model


def keep(model: Any, folder: Path, task: Task, note: Callable[[str], None], by: str) -> None:
    """Write the `model` that the device `by` has quantised to `folder`, by one rank for each folder, where the disk has room. What was kept of the same
    model with other files or versions, or by another device, goes. Neither a full disk nor another training must end a training for it.
    """
    sources = weight_digests.sources(model)
    if not task.is_keeper or not all(sources.values()):
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock.without_waiting(lock_of(folder)) as is_mine:
            if is_stored(str(folder)) and (files.read_object(folder / _MADE) or {}).get("by") == by:
                note(f"base: quantised; meanwhile another training has stored it in {folder}")
            elif not is_mine:
                note(f"base: quantised, and not stored: another training uses {folder} at this moment")
            else:
                _store(model, folder, {"sources": sources, "by": by}, note)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the libraries that write have errors of their own
        note(f"the quantised base could not be stored in {folder}: {disk_fault(error, folder.parent) or first_words(error)}")


def _store(model: Any, folder: Path, about: dict[str, Any], note: Callable[[str], None]) -> None:
    """`keep`, by who has the lock alone. Raises what the libraries raise that write."""
    partial = folder.with_name(f".{folder.name}.partial")
    for left in (folder, partial):  # a damaged one, and that of a training that was killed
        shutil.rmtree(left, ignore_errors=True)
    remove_other_files(folder)
    needed_bytes = sum(tensor.nbytes for tensor in tensors_of(model).values())
    if not has_room(folder, needed_bytes, note):
        return
    try:
        model.save_pretrained(partial)
        (partial / _MADE).write_text(json.dumps({"held": _held(model), **about}), encoding="utf-8")
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    note(f"base: quantised, and stored for the next start in {folder} ({size_words(needed_bytes)})")


def has_room(folder: Path, needed_bytes: int, note: Callable[[str], None]) -> bool:
    """Whether the disk takes so much more; bases in other precisions make room. Says so where it does not."""
    disk = folder.parent
    if shutil.disk_usage(disk).free < needed_bytes + _SPARE_BYTES:
        _remove(folder, lambda name: name != folder.name)
    free_bytes = shutil.disk_usage(disk).free
    if free_bytes < needed_bytes + _SPARE_BYTES:
        note(f"the quantised base is not stored: it needs {size_words(needed_bytes)}, and {size_words(free_bytes)} are free in {disk}")
        return False
    return True


def remove_other_files(folder: Path) -> None:
    """Remove what is kept of this model with other files or versions, unless another training reads or writes it."""
    stem = _stem(folder)
    same = f"{stem}{folder.name.removeprefix(stem).partition('-')[0]}-"
    _remove(folder, lambda name: not name.startswith(same))


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


def _stem(folder: Path) -> str:
    """With what the names of all bases of a model begin."""
    return folder.name[: folder.name.rindex(_NF4)] + _NF4


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """What a model holds and saves, by name."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def _held(model: Any) -> str:
    return weight_digests.joined(weight_digests.each(tensors_of(model)))
