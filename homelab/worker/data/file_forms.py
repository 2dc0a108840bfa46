"""Data files whose rows stand in another form than their name says: what they are, and the command that makes rows of them. Pure."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

_SEPARATORS = (";", "\t", "|")
_ROW = 'write {"messages": [...]}, {"prompt": ..., "completion": ...} or {"text": ...}'
_LINE = "every line must be one JSON object, without line breaks in it"
_UNDER_KEY = "json.dump(json.load(sys.stdin)[{key!r}], sys.stdout)"
_OF_COLUMNS = "c = json.load(sys.stdin); json.dump([dict(zip(c, r)) for r in zip(*(v.values() if isinstance(v, dict) else v for v in c.values()))], sys.stdout)"
_OF_PYTHON = "import ast; [print(json.dumps(ast.literal_eval(row))) for row in sys.stdin if row.strip()]"
_WITH_COMMAS = "import csv; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter={separator!r}))"


def fix_of_line(line: str, path: Path) -> str:
    """The fix for a line of a .jsonl file that is no JSON object."""
    line = line.strip()
    if line.startswith("["):
        return (
            'each row is a conversation: write {"messages": [...]} around it'
            if _is_conversation(line)
            else f"the file is one JSON list: {_renamed(path, '.json')}"
        )
    if line.endswith(","):
        return f"remove the comma at the end of a row: sed -i 's/,[[:space:]]*$//' {shlex.quote(str(path))}"
    if line.startswith(("{'", "{ '")):
        return f"the line is Python, not JSON: {_made(path, _OF_PYTHON)}"
    return _LINE if line.startswith("{") else _ROW


def fix_of_value(value: Any, path: Path) -> str:
    """The fix for a .json file that is JSON and no list of rows."""
    lists = (
        [key for key, inner in value.items() if isinstance(inner, list) and inner and isinstance(inner[0], dict)]
        if isinstance(value, dict)
        else []
    )
    if len(lists) == 1 and lists[0] not in ("messages", "conversations", "conversation") and lists[0].isidentifier():
        return f'its rows are under "{lists[0]}": {_made(path, _UNDER_KEY.format(key=lists[0]))}'
    if isinstance(value, dict) and value and all(isinstance(inner, list | dict) for inner in value.values()) and not lists:
        return f"it is a table by columns: {_made(path, _OF_COLUMNS)}"
    return 'write [{"messages": ...}, ...]: a single row stands between [ and ], too'


def fix_of_text(text: str, path: Path) -> str:
    """The fix for a .json file that is not JSON."""
    first = text.lstrip().partition("\n")[0]
    try:
        is_row = isinstance(json.loads(first), dict)
    except ValueError:
        is_row = False
    if is_row:
        return f"it has one object per line: {_renamed(path, '.jsonl')}"
    return "correct it there: a .json file is one list of objects, with double quotes around each name and text, and no comma after the last one"


def fix_of_header(names: list[str], path: Path) -> tuple[str, str] | None:
    """(what separates the columns, the fix) for a .csv file that has one column by its header; None for a real one."""
    found = next((mark for mark in _SEPARATORS if len(names) == 1 and mark in names[0]), None)
    return (repr(found), fix_of_separator(found, path)) if found else None


def fix_of_separator(separator: str, path: Path) -> str:
    """The command that writes the table with commas."""
    return _made(path.with_suffix(".csv"), _WITH_COMMAS.format(separator=separator), source=path)


def _is_conversation(line: str) -> bool:
    try:
        value = json.loads(line)
    except ValueError:
        return False
    return bool(value) and isinstance(value[0], dict) and "content" in value[0]


def _renamed(path: Path, suffix: str) -> str:
    return f"mv {shlex.quote(str(path))} {shlex.quote(str(path.with_suffix(suffix)))}, and name the new file in the recipe"


def _made(path: Path, code: str, source: Path | None = None) -> str:
    """A command that writes the file `rows-NAME` beside `path`."""
    target = path.with_name(f"rows-{path.name}")
    return f"python3 -c {shlex.quote(f'import json, sys; {code}')} < {shlex.quote(str(source or path))} > {shlex.quote(str(target))}, and name that file in the recipe"
