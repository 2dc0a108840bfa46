"""Data that no training could read is said of the plan already: a document, a picture, an archive, a damaged or an empty file."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from homelab.cli import main
from homelab.controller.attempt import data_files, inputs
from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import InputError
from tests import builders
from tests.controller.checks import healthy
from tests.fakes import FakeFleet

ROW = json.dumps({"text": "a red door"}).encode() + b"\n"

RECIPE = """
[model]
name = "HuggingFaceTB/SmolLM2-135M"
[data]
train = "{name}"
[method]
kind = "lora"
[train]
global_batch = 8
steps = 10
learning_rate = 1e-4
"""


def tar() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        entry = tarfile.TarInfo("rows.jsonl")
        entry.size = len(ROW)
        archive.addfile(entry, io.BytesIO(ROW))
    return stream.getvalue()


def packed() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("rows.jsonl", ROW)
    return stream.getvalue()


UNREADABLE: dict[str, tuple[str, bytes, str]] = {
    "PDF": ("x.pdf", b"%PDF-1.7\n%\xe2\xe3", "PDF"), "PDF by another name": ("x.jsonl", b"%PDF-1.7\n%\xe2\xe3", "PDF"),
    "picture": ("x.png", b"\x89PNG\r\n\x1a\n\x00\x00", "picture"), "photo": ("x.jpg", b"\xff\xd8\xff\xe0\x00\x10JFIF", "picture"),
    "zip": ("x.zip", packed(), "zip"), "spreadsheet": ("x.xlsx", packed(), "zip"), "tar": ("x.tar", tar(), "tar"),
    "tar.gz": ("x.tar.gz", gzip.compress(tar()), "gzip"), "gz": ("x.jsonl.gz", gzip.compress(ROW), "gzip"), "gz without the name": ("x.jsonl", gzip.compress(ROW), "gzip"),
    "7z": ("x.7z", b"7z\xbc\xaf\x27\x1c\x00\x04", "7z"), "database": ("x.db", b"SQLite format 3\x00\x10\x00", "SQLite"), "sound": ("x.mp3", b"ID3\x04\x00", "sound"),
    "binary": ("x.txt", b"\x7fELF\x02\x01\x01\x00", "binary"), "Git LFS": ("x.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "Git LFS"),
    "Parquet that is none": ("x.parquet", b"<html>not found</html>", "Parquet"), "unknown name": ("x.docx.md", b"# a title\n", "ends in"),
    "no JSON": ("x.jsonl", ROW + b'{"text": "a re\n' + ROW, "line 2"), "no objects": ("x.jsonl", b'["a"]\n', "line 1"), "a number": ("x.json", b"5", "list"),
    "one object": ("x.json", b'{"text": "a"}', "list"), "a list of texts": ("x.json", b'["a", "b"]', "row 1"), "latin-1": ("x.txt", "schön\n".encode("latin-1"), "UTF-8"),
    "nothing but spaces": ("x.jsonl", b"\n \n", "no rows"), "an empty list": ("x.json", b"[]", "no rows"), "a header alone": ("x.csv", b"text,label\r\n", "no rows"),
}  # fmt: skip
READABLE = {
    "x.jsonl": ROW * 3, "x.json": b"[" + ROW.strip() + b"]", "x.csv": b"text\na red door\n", "x.txt": b"a red door\n\nanother\n", "x.parquet": b"PAR1\x15\x04\x00\x00",
    "long.jsonl": ROW * 60_000, "bom.jsonl": b"\xef\xbb\xbf" + ROW,
}  # fmt: skip


def shipped(path: Path) -> RecipeInput:
    return RecipeInput("train", "shipped", str(path), path)


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_named_with_its_first_edit(tmp_path: Path, case: str) -> None:
    name, content, word = UNREADABLE[case]
    (tmp_path / name).write_bytes(content)
    error = data_files.fault([shipped(tmp_path / name)])
    assert error is not None and name in error.where and error.hint
    assert word in f"{error.message} {error.where.replace(str(tmp_path / name), '')}", "the file's own name has the word, too"


@pytest.mark.parametrize("name", READABLE)
def test_what_can_be_read_is_let_through(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(READABLE[name])
    assert data_files.fault([shipped(tmp_path / name)]) is None


@pytest.mark.parametrize("case", ["PDF", "gz", "no JSON", "zip"])
def test_the_plan_ends_with_1_and_says_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    name, content, word = UNREADABLE[case]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "cluster.toml").write_text('[[nodes]]\nname = "a"\nhost = "192.0.2.1"\ngpus = [{ model = "RTX 3090", vram_gb = 24 }]\n')
    (tmp_path / "r.toml").write_text(RECIPE.format(name=name))
    monkeypatch.setenv("HOMELAB_CLUSTER", str(tmp_path / "cluster.toml"))
    monkeypatch.setenv("COLUMNS", "300")
    assert main.run(["plan", str(tmp_path / "r.toml"), "--offline"]) == 1
    said = capsys.readouterr().out
    assert "It cannot run" in said and word in said and "First: " in said and "Next: homelab launch" not in said


@pytest.mark.parametrize(
    ("role", "suffix", "named"),
    [
        ("data", ".jsonl", '[data] train = "rows/a.jsonl"'),
        ("data", ".png", "relative to the recipe"),
        ("script", ".py", '[script] path = "rows/a.py"'),
    ],
)
def test_a_folder_is_answered_with_a_file_of_it(tmp_path: Path, role: str, suffix: str, named: str) -> None:
    (tmp_path / "rows").mkdir()
    for name in ("b", "a"):
        (tmp_path / "rows" / f"{name}{suffix}").write_bytes(ROW)
    recipe = healthy.recipe(data={"train": "rows/"}) if role == "data" else builders.script_recipe(script={"path": "rows/"})
    with pytest.raises(InputError, match="this is not a file") as caught:
        inputs.of_recipe(recipe, tmp_path / "r.toml")
    assert named in str(caught.value.hint)


WRONG = {"where": "x.jsonl, line 1", "message": 'the row has no "text", it has "txet"', "hint": 'rename "txet" to "text"'}


@pytest.mark.parametrize("rows_bad", [[WRONG], []])
def test_a_plan_that_asks_the_nodes_takes_what_one_finds_in_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rows_bad: list[dict[str, str]]
) -> None:
    """Keys are the worker's to judge: from here such a file looks well."""
    (tmp_path / "x.jsonl").write_bytes(b'{"txet": "a red door"}\n')
    (tmp_path / "cluster.toml").write_text(f'[[nodes]]\nname = "tower"\nhost = "192.0.2.1"\nworkdir = "{tmp_path}/tower"\n')
    (tmp_path / "r.toml").write_text(RECIPE.format(name="x.jsonl"))
    fleet = FakeFleet(tmp_path, ["tower"])
    fleet.answer("facts", builders.facts("tower", recipe=healthy.recipe(data={"train": "x.jsonl"})).model_dump(mode="json"))
    fleet.answer(
        "sample-data", {"sample": {"files": {"train": {"whole": True, "rows_read": 1, "rows_bad": rows_bad}}}}
    ).replace_connections(monkeypatch)
    monkeypatch.setenv("HOMELAB_CLUSTER", str(tmp_path / "cluster.toml"))
    monkeypatch.setenv("COLUMNS", "300")
    code = main.run(["plan", str(tmp_path / "r.toml"), "--no-dry-run"])
    said = capsys.readouterr().out
    assert fleet.verbs("sample-data") and ("Next: homelab launch" in said) is not bool(rows_bad)
    assert code == (1 if rows_bad else 0) and (
        WRONG["message"] in said and "First: " in said and WRONG["hint"] in said.partition("First: ")[2]
    ) is bool(rows_bad)


def test_the_command_that_converts_runs_whatever_the_file_is_called(tmp_path: Path) -> None:
    path = tmp_path / "anna's $(rows).jsonl"
    path.write_bytes('{"text": "été"}\n'.encode("latin1"))
    error = data_files.fault([RecipeInput("train", "shipped", str(path), local=path)])
    assert error is not None
    command = str(error.hint).partition(", and name")[0]
    subprocess.run(["sh", "-c", command], check=True, cwd="/", timeout=20)
    assert json.loads((tmp_path / f"utf8-{path.name}").read_text(encoding="utf-8")) == {"text": "été"}
