"""The cache of encoded rows on this node's disk: made once, read at every later start with the same data, tokenizer and settings.

<workdir>/rows/<key>.rows is one JSON line, then the rows as bytes. The key stands for all that rows are made of: the bytes of the data files, the recipe's
[data], the tokenizer's files, the versions that read them, and this code. Rows with a time in them (`template_clock`) are of one launch, and are not kept.
Data of the hub is not kept either: its commit is known when it is loaded. What is not whole counts as not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from homelab.shared.protocol import files
from homelab.shared.protocol.digest import file_sha256
from homelab.shared.protocol.row_forms import RULES_KEY
from homelab.worker.data.rows import EncodedData, Row
from homelab.worker.runtime.task import Task

_SCHEMA = 2
_CODE = Path(__file__).parents[2]  # homelab/
_MADE_BY = ("worker/data", "worker/model/pretrained.py", "shared/law", "shared/protocol")
_READ_BY = ("transformers", "tokenizers", "jinja2", "trl", "pyarrow")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_MOST_FILES = 8  # of one node: who tries settings makes new rows each time
_SPARE_BYTES = 2 * 10**9  # stays free for checkpoints and logs, because the cache is only for speed


def file_of(task: Task, path: str) -> Path | None:
    """Where the rows of this run are kept on this node, whether they are there or not. `path`: of the model. None where they cannot be known by a key."""
    folder = _tokenizer_folder(path, task.model.revision)
    code = [path for name in _MADE_BY for path in ([_CODE / name] if name.endswith(".py") else sorted((_CODE / name).glob("*.py")))]
    if folder is None or not all(path.is_file() for path in code):
        return None
    for source in filter(None, task.run["data"].values()):
        place = Path(source["path"]).expanduser()
        # A file that is not here as it was at the launch has an error of its own (`readers`).
        if source["kind"] != "file" or not source.get("sha256") or not place.is_file() or file_sha256(place) != source["sha256"]:
            return None
    # The model's files but its weights, and its folders of templates: which of them a tokenizer reads is its own affair.
    texts = [
        file
        for pattern in ("*", "*chat_templates/*")
        for file in sorted(folder.glob(pattern))
        if file.is_file() and file.suffix not in _WEIGHTS
    ]
    train = task.train
    made_of: list[Any] = [
        _SCHEMA, task.run.get(RULES_KEY), sys.version, task.run["recipe"]["data"], train.seq_len, train.seed,
        {role: source and [source["sha256"], Path(source["path"]).suffix] for role, source in task.run["data"].items()},
        {name: importlib.metadata.version(name) for name in _READ_BY if importlib.util.find_spec(name)},
        {file.relative_to(folder).as_posix(): file_sha256(file) for file in texts},
        [file_sha256(file) for file in code],
    ]  # fmt: skip
    key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]
    return task.run_dir.parent.parent / "rows" / f"{key}.rows"


def load(file: Path) -> EncodedData | None:
    """The rows of `file`; None where it is not there, or is not what was written."""
    try:
        with file.open("rb") as stream:
            head = json.loads(stream.readline())
            content = stream.read()
        if head.pop("sha256") != _digest(head, content):
            return None
        parts, begin = [], 0
        for size in head["bytes"]:
            parts.append(content[begin : begin + size])
            begin += size
        train, held_out = (list(_rows(parts[first : first + _ARRAYS])) for first in (0, _ARRAYS))
        os.utime(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return EncodedData(train, held_out, list(head["notes"]))


def keep(file: Path, data: EncodedData) -> None:
    """Write the rows, where the disk has room. A full disk must not end a training for it."""
    parts = [part for rows in (data.train, data.held_out) for part in _arrays(rows)]
    content = b"".join(parts)
    head: dict[str, Any] = {"bytes": [len(part) for part in parts], "notes": data.notes}
    head["sha256"] = _digest(head, content)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(file.parent).free < len(content) + _SPARE_BYTES:
            return
        files.replace(file, json.dumps(head).encode() + b"\n" + content)
        kept = sorted(file.parent.glob("*.rows"), key=lambda other: other.stat().st_mtime, reverse=True)
        for other in kept[_MOST_FILES:]:
            other.unlink()


def _digest(head: dict[str, Any], content: bytes) -> str:
    return hashlib.sha256(json.dumps(head, sort_keys=True).encode() + content).hexdigest()


def _tokenizer_folder(path: str, revision: str | None) -> Path | None:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(path, "tokenizer_config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


_ARRAYS = 8


def _arrays(rows: Sequence[Row]) -> list[bytes]:
    """The _ARRAYS arrays of a part of the data, in the order in which `_rows` takes them."""
    numbers = (
        array("q", [len(row.tokens) for row in rows]),
        array("q", [len(row.sources) for row in rows]),
        array("q", [len(row.starts) for row in rows]),
        array("q", [source for row in rows for source in row.sources]),
        array("q", [start for row in rows for start in row.starts]),
    )
    return [
        *(part.tobytes() for part in numbers),
        b"".join(row.tokens.tobytes() for row in rows),
        b"".join(row.trained for row in rows),
        bytes(row.good for row in rows),
    ]


def _rows(parts: Sequence[bytes]) -> Iterator[Row]:
    *numbers, tokens, trained, good = parts
    counts = [memoryview(part).cast("q").tolist() for part in numbers[:3]]
    all_sources, all_starts = (memoryview(part).cast("q").tolist() for part in numbers[3:])
    width, token, source, start = array("i").itemsize, 0, 0, 0
    for of_tokens, of_sources, of_starts, is_good in zip(*counts, good, strict=True):
        own = array("i", tokens[token * width : (token + of_tokens) * width])
        marks = trained[token : token + of_tokens]
        yield Row(
            own, marks, tuple(all_sources[source : source + of_sources]), tuple(all_starts[start : start + of_starts]), good=bool(is_good)
        )
        token, source, start = token + of_tokens, source + of_sources, start + of_starts
