"""Small files on a disk: written so that no reader sees half of one, and read so that a damaged one never ends in a traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    AnyPath = str | os.PathLike[str]
    JsonObject = dict[str, Any]  # as it is read or written; never with other keys than strings

_LARGEST_JSON_BYTES = 64 << 20  # the largest of ours, the stored digests, has one


def write_atomic(path: AnyPath, data: bytes | Iterable[bytes], mode: int = 0o644) -> None:
    """Write bytes, or one part of them after the other, beside `path`, sync them to the disk and rename them into place; missing folders are made.

    Raises OSError; then the old file is untouched.
    """
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    _replace(path, data, mode, is_durable=True)


def replace(path: AnyPath, data: bytes) -> None:
    """The same without waiting for the disk: for what is written often and worth nothing after a power cut. Raises OSError.

    The folder has to be there: a heartbeat does not bring back a run whose folder was deleted.
    """
    _replace(path, data, 0o666, is_durable=False)


def write_json(path: AnyPath, value: Any, mode: int = 0o644) -> None:
    """`write_atomic` of readable JSON. Raises OSError."""
    write_atomic(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode(), mode)


def partial_name(path: AnyPath) -> str:
    """The path beside `path` where this process writes until the content is whole."""
    folder, name = os.path.split(os.fspath(path))
    return os.path.join(folder, f".{name}.partial.{os.getpid()}")


def _replace(path: AnyPath, data: bytes | Iterable[bytes], mode: int, *, is_durable: bool) -> None:
    partial = partial_name(path)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as stream:
            stream.writelines([data] if isinstance(data, bytes) else data)
            if is_durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.unlink(partial)
        raise


def sync(path: AnyPath) -> None:
    """Wait until the disk holds a file, or the names in a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def text(path: AnyPath) -> str:
    """The text of a small file, without the white space around it; "" where the file cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def integer(path: AnyPath) -> int | None:
    """The whole number that a small file holds; None where it holds none, or cannot be read."""
    try:
        return int(text(path))
    except ValueError:
        return None


def read_json(path: AnyPath) -> Any:
    """The value; None when the file is missing, broken, too large or no plain file (a read of a pipe would wait)."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _LARGEST_JSON_BYTES:
            return None
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)
    except (OSError, ValueError, RecursionError):
        return None


def read_object(path: AnyPath) -> JsonObject | None:
    """The JSON object; None when the file is missing, broken or holds something else."""
    value = read_json(path)
    return value if isinstance(value, dict) else None


def json_objects(lines: Iterable[str]) -> list[JsonObject]:
    """The JSON objects among some lines of text; a line that was cut short, or is broken in another way, is left out."""
    values = []
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            values.append(value)
    return values


def tail(path: AnyPath, line_count: int, byte_limit: int = 64 * 1024) -> list[str]:
    """The last lines of a text file, [] when there is none. Reads at most `byte_limit` bytes."""
    if not os.path.isfile(path):  # a read of a pipe would wait
        return []
    try:
        with open(path, "rb") as stream:
            stream.seek(0, os.SEEK_END)
            start = max(0, stream.tell() - byte_limit)
            stream.seek(start)
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    if start:
        lines = lines[1:]
    return lines[-line_count:] if line_count else []
