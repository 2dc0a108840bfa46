"""A file whose rows stand in another form than its name says is refused, and the command of its fix makes rows of it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from homelab.worker.data import readers
from homelab.worker.errors import WorkerError

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
LINES = "\n".join(map(json.dumps, ROWS)) + "\n"
COLUMNS = {"prompt": ["a", "c"], "completion": ["b", "d"]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("one list.jsonl", json.dumps(ROWS)), ("a list in lines.jsonl", json.dumps(ROWS, indent=1)), ("commas.jsonl", LINES.replace("}\n", "},\n")),
        ("python.jsonl", "".join(f"{row}\n" for row in ROWS)), ("lines.json", LINES), ("under a key.json", json.dumps({"version": "1", "data": ROWS})),
        ("columns.json", json.dumps(COLUMNS)), ("pandas.json", json.dumps({name: dict(enumerate(column)) for name, column in COLUMNS.items()})),
        ("semicolons.csv", "prompt;completion\na;b\nc;d\n"), ("tabs.csv", "prompt\tcompletion\na\tb\nc\td\n"), ("tabs.tsv", "prompt\tcompletion\na\tb\nc\td\n"),
    ],
)  # fmt: skip
def test_the_fix_makes_rows_of_it(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(WorkerError) as refused:
        readers.read({"path": str(tmp_path / name)})
    command = re.search(r"(?:mv|sed|python3) .*?(?=, and name|$)", refused.value.hint)
    assert command, refused.value.hint
    subprocess.run(command[0], shell=True, check=True)
    (made,) = tmp_path.glob("rows-*") if ">" in command[0] else tmp_path.iterdir()
    assert [record.fields for record in readers.read({"path": str(made)})] == ROWS


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("one.json", json.dumps(ROWS[0]), "between"), ("comma.json", json.dumps(ROWS)[:-1] + ",]", "no comma after the last"), ("words.jsonl", "hello\n", "write {"),
        ("bare.jsonl", '[{"role": "user", "content": "a"}]\n', 'write {"messages": [...]} around it'), ("open.jsonl", '{"text": "a\n', "every line must be one JSON object"),
    ],
)  # fmt: skip
def test_where_no_command_helps_the_edit_is_said(tmp_path: Path, name: str, text: str, hint: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(WorkerError) as refused:
        readers.read({"path": str(tmp_path / name)})
    assert hint in refused.value.hint


def test_a_text_column_of_any_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "plain.csv").write_text("what was said\nhello; you\n")
    assert [record.fields for record in readers.read({"path": str(tmp_path / "plain.csv")})] == [{"what was said": "hello; you"}]
