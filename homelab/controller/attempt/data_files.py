"""What can be seen here of data that no training could read: a file of another kind, or rows that are none. Keys and content are the worker's to judge."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import InputError
from homelab.shared.protocol import file_kind
from homelab.shared.protocol.data_rows import beginning

_LOOKED_AT_BYTES = 1 << 20


def fault(items: Sequence[RecipeInput]) -> InputError | None:
    """The first file of this machine that cannot be read as data; None where all can, as far as their beginnings say."""
    files = [(item.role, item.local) for item in items if item.role in ("train", "eval") and item.local is not None]
    return next((error for role, path in files if (error := _of_file(role, path)) is not None), None)


def _of_file(role: str, path: Path) -> InputError | None:
    where = f"key data.{role}: {path}"
    try:
        with path.open("rb") as stream:
            disguised = file_kind.unmask(path, stream.read(file_kind.FIRST_BYTES))
        rows, is_whole = beginning(str(path), _LOOKED_AT_BYTES)
    except OSError as error:
        return InputError(f"this file cannot be read: {error.strerror}", where=where, hint="name another file, or let this user read it")
    if disguised is not None:
        return InputError(f"the data file is {disguised[0]}", where=where, hint=disguised[1])
    if path.suffix not in file_kind.SUFFIXES:
        allowed = ", ".join(file_kind.SUFFIXES)
        return InputError(
            f"the name of a data file ends in {allowed}", where=where, hint="rename the file by its format, or convert it to JSONL"
        )
    if rows is None or path.suffix == ".parquet":
        return None
    try:
        return _of_text(path.suffix, rows.decode("utf-8-sig"), is_whole, where)
    except UnicodeDecodeError:
        problem, line, fix = file_kind.undecodable(path, io.BytesIO(rows))
        return InputError(problem, where=f"{where}, line {line}", hint=fix)


def _of_text(suffix: str, text: str, is_whole: bool, where: str) -> InputError | None:
    is_empty = not text.strip() or (suffix == ".csv" and "\n" not in text.strip())  # the first line of a table names its columns
    if is_empty:
        return InputError("the data file has no rows", where=where, hint="put at least one sample into it") if is_whole else None
    if suffix == ".json":
        return _of_list(text, where)
    for number, line in enumerate(text.split("\n") if suffix == ".jsonl" else [], start=1):
        if line.strip() and not isinstance(_json(line), dict):
            return InputError(
                "this line is not a JSON object",
                where=f"{where}, line {number}",
                hint="every line must be one JSON object, without line breaks in it",
            )
    return None


def _of_list(text: str, where: str) -> InputError | None:
    rows = _json(text)
    if not isinstance(rows, list):
        hint = "a .json file must be one list of objects; if it has one object per line, rename it to .jsonl"
        return InputError("this file is not a JSON list", where=where, hint=hint)
    if not rows:
        return InputError("the data file has no rows", where=where, hint="put at least one sample into it")
    number = next((number for number, row in enumerate(rows, start=1) if not isinstance(row, dict)), None)
    return (
        InputError("this row is not a JSON object", where=f"{where}, row {number}", hint='write [{"messages": ...}, ...]')
        if number
        else None
    )


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
