"""Reads training data from files: one record per row, with the place of the row for error messages.

JSONL, JSON, CSV, Parquet and plain text are read here with the standard library (pyarrow only for Parquet); only data from the
hub needs `datasets`, whose import alone costs about a second (hub.py).
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homelab.shared.protocol import file_kind
from homelab.shared.protocol.file_kind import SUFFIXES
from homelab.worker.data import file_forms
from homelab.worker.errors import WorkerError


@dataclass(frozen=True, slots=True)
class Record:
    """One row of the data. `index` counts rows from 0: it is the sample id everywhere. `where` is for error messages.

    `filled`: of a table whose columns have types (Parquet, the hub), in which each object has the keys of all others, as null.
    """

    index: int
    where: str
    fields: dict[str, Any]
    filled: bool = False


def read(source: dict[str, Any], *, node: str = "this node", run: str = "RUN", most: int | None = None) -> list[Record]:
    """All rows of a data file, or the first `most`, an entry of run.json's "data": {"path", "kind": "file", "sha256"}. (Data from the hub: `homelab.worker.data.hub`.)

    The fix of an error names `node` and `run`. Raises WorkerError naming file and line when a row cannot be read, and when the
    file is not the one that was launched: two nodes with different data would break the training without an error.
    """
    path = Path(source["path"]).expanduser()
    again = f"homelab recover {run} sends the original to {node} again" if source.get("sent") == "shipped" else ""
    if not path.is_file():
        hint = again or "put the file there on every node, or use a path relative to the recipe: then homelab sends it"
        raise WorkerError("the data file is not on this node", where=str(path), hint=hint)
    with path.open("rb") as file:
        disguised = file_kind.unmask(path, file.read(file_kind.FIRST_BYTES))
    if disguised is not None:
        kind, fix = disguised
        raise WorkerError(f"the data file is {kind}", where=str(path), hint=fix)
    if path.suffix not in SUFFIXES:
        raise WorkerError(
            f'data files end in {", ".join(SUFFIXES)}; this one ends in "{path.suffix}"',
            where=f"{path}, key [data] train",
            hint=file_forms.fix_of_separator("\t", path)
            if path.suffix == ".tsv"
            else "rename the file by its format, or convert it to JSONL",
        )
    if source.get("sha256"):
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != source["sha256"]:
            fix = again or f"copy the same file to every node: {path} on {node} is a different file"
            raise WorkerError(
                f"the data file differs from the one this run was launched with (sha256 {sha256[:12]}, not {source['sha256'][:12]})",
                where=str(path),
                hint=f"{fix}; changed data is a new training: launch it as a new run",
            )
    rows = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet, ".txt": _text}[path.suffix](path)
    try:
        records = [
            Record(index, where, fields, path.suffix == ".parquet") for index, (where, fields) in enumerate(itertools.islice(rows, most))
        ]
    except UnicodeDecodeError as error:
        with path.open("rb") as file:  # the error counts from the last block that was read
            problem, line, fix = file_kind.undecodable(path, file)
        raise WorkerError(problem, where=f"{path}, line {line}", hint=fix) from error
    if not records:
        raise WorkerError("the data file has no rows", where=str(path), hint="each row is one sample")
    return records


def _jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise WorkerError(f"this line is not JSON: {error}", where=where, hint=file_forms.fix_of_line(line, path)) from error
            yield where, _object(fields, where, file_forms.fix_of_line(line, path))


def _json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise WorkerError(f"this file is not JSON: {error}", where=str(path), hint=file_forms.fix_of_text(text, path)) from error
    if not isinstance(rows, list):
        raise WorkerError("a .json data file is one list of objects", where=str(path), hint=file_forms.fix_of_value(rows, path))
    for number, fields in enumerate(rows, start=1):
        where = f"{path}, row {number}"
        yield where, _object(fields, where)


def _csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(1 << 30)  # the default of 128 KiB is too small for a long document
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            if (apart := file_forms.fix_of_header(list(reader.fieldnames or ()), path)) is not None:
                raise WorkerError(
                    f"the columns of a .csv file are separated by commas, but here by {apart[0]}", where=f"{path}, line 1", hint=apart[1]
                )
            for fields in reader:
                where = f"{path}, line {reader.line_num}"
                if None in fields or None in fields.values():
                    hint = 'put double quotes around fields that hold commas or line breaks, and write " inside them as ""'
                    raise WorkerError("this row has another number of columns than the header", where=where, hint=hint)
                yield where, fields
        except csv.Error as error:
            hint = "close every double quote on the row where it was opened"
            raise WorkerError(f"this is not CSV: {error}", where=f"{path}, line {reader.line_num}", hint=hint) from error


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        hint = "pip install pyarrow in the node's environment, or convert the data to JSONL"
        raise WorkerError("reading Parquet needs pyarrow", where=str(path), hint=hint) from error
    try:
        table = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in table.iter_batches():
            for fields in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", fields
    except (pyarrow.ArrowInvalid, OSError) as error:
        hint = "copy the file again; the usual cause is an incomplete copy"
        raise WorkerError(f"this is not a readable Parquet file: {error}", where=str(path), hint=hint) from error


def _text(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plain text: every paragraph is a sample; empty lines separate paragraphs."""
    paragraph: list[str] = []
    start = 1
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate([*file, "\n"], start=1):
            if line.strip():
                start = start if paragraph else number
                paragraph.append(line)
            elif paragraph:
                yield f"{path}, line {start}", {"text": "".join(paragraph).rstrip("\n")}
                paragraph = []


def _object(
    fields: Any, where: str, hint: str = 'write {"messages": [...]}, {"prompt": ..., "completion": ...} or {"text": ...}'
) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise WorkerError(f"a row is a JSON object, this one is {type(fields).__name__}", where=where, hint=hint)
    return fields
