"""Rows that are kept on a node are the same to the bit, stand for all that they are made of, and count as not there where they are not whole."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from homelab.worker.data import encoding, row_cache
from homelab.worker.data.rows import EncodedData
from homelab.worker.errors import WorkerError
from homelab.worker.runtime.task import Task
from homelab.worker.training.run import Run
from tests.worker import harness

pytestmark = pytest.mark.timeout(120)
MOMENT = "2026-11-26T12:00:00+00:00"


class _Recorder:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.total_steps, self.step_tokens = 0, 0.0

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.fixture
def own_model(tmp_path: Path, model: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


@pytest.fixture
def own_data(tmp_path: Path) -> Path:
    return harness.write_jsonl(tmp_path / "rows.jsonl", harness.chat_rows(40))


def _task(folder: Path, data: Path, **recipe: Any) -> Task:
    task = harness.task_of(folder / "work/runs/one", **recipe)
    task.run.update(data={"train": harness.source(data), "eval": None}, moment=MOMENT, name="one")
    return task


def _loaded(task: Task, model: Path) -> tuple[EncodedData, list[str]]:
    recorder = _Recorder()
    return Run(task, recorder)._load_data(str(model)), recorder.notes  # type: ignore[arg-type]


def _kept(folder: Path) -> list[Path]:
    return sorted((folder / "work/rows").glob("*"))


@pytest.mark.parametrize("recipe", [{}, {"data__packing": True}, {"data__eval_fraction": 0.2}])
def test_what_is_read_is_what_was_encoded(
    tmp_path: Path, own_model: Path, own_data: Path, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = _task(tmp_path, own_data, **recipe)
    encoded, notes = _loaded(task, own_model)
    assert encoded.train and len(_kept(tmp_path)) == 1

    def never(*_: Any) -> None:
        raise AssertionError("it was there")

    monkeypatch.setattr(encoding, "load_data", never)
    read, told = _loaded(task, own_model)
    assert (read.train, read.held_out, read.notes, read.commits) == (encoded.train, encoded.held_out, encoded.notes, {})
    assert told == notes, "a person is told the same"
    assert all(type(row.trained) is bytes and type(row.sources) is tuple for row in read.train)


def _other_data(folder: Path, model: Path, data: Path) -> Task:
    text = data.read_text().replace("a", "e")
    data.write_text(text)
    return _task(folder, data)


def _other_template(folder: Path, model: Path, data: Path) -> Task:
    path = model / "chat_template.jinja"
    assert path.is_file()
    path.write_text(path.read_text() + " ")
    return _task(folder, data)


def _other_tokens(folder: Path, model: Path, data: Path) -> Task:
    (model / "tokenizer_config.json").write_text((model / "tokenizer_config.json").read_text() + "\n")
    return _task(folder, data)


def _more_templates(folder: Path, model: Path, data: Path) -> Task:
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/tools.jinja").write_text("x")
    return _task(folder, data)


def _other_suffix(folder: Path, model: Path, data: Path) -> Task:
    return _task(folder, data.rename(data.with_suffix(".json")))


CHANGES: list[Callable[[Path, Path, Path], Task]] = [
    _other_data, _other_template, _other_tokens, _more_templates, _other_suffix,
    *(lambda folder, _, data, change=change: _task(folder, data, **change) for change in (
        {"train__seq_len": 128}, {"train__seed": 7}, {"data__packing": True}, {"data__completion_only": False}, {"data__eval_fraction": 0.1},
    )),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_another_thing_that_rows_are_made_of_is_another_key(
    tmp_path: Path, own_model: Path, own_data: Path, change: Callable[[Path, Path, Path], Task]
) -> None:
    before = row_cache.file_of(_task(tmp_path, own_data), str(own_model))
    after = row_cache.file_of(change(tmp_path, own_model, own_data), str(own_model))
    assert before is not None and after is not None and before != after


def test_versions_and_code_are_of_the_key_and_the_rest_of_a_recipe_is_not(
    tmp_path: Path, own_model: Path, own_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def file(**recipe: Any) -> Path | None:
        return row_cache.file_of(_task(tmp_path, own_data, **recipe), str(own_model))

    usual = file()
    assert usual is not None
    assert file(train__learning_rate=1e-5, method__rank=9, train__epochs=7) == usual
    (own_model / "model.safetensors").write_bytes(b"other weights")
    assert file() == usual
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99" if name == "tokenizers" else real(name))
    assert file() not in (None, usual)
    monkeypatch.undo()
    code = tmp_path / "homelab"
    for name in row_cache._MADE_BY:
        copy = shutil.copytree if (row_cache._CODE / name).is_dir() else shutil.copy
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        copy(row_cache._CODE / name, code / name)
    monkeypatch.setattr(row_cache, "_CODE", code)
    assert file() == usual
    (code / "worker/data/samples.py").write_text("# other rules\n")
    assert file() not in (None, usual)


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-1],
        lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
        lambda whole: b"{}\n" + whole,
        lambda whole: b"\xff" + whole,
        lambda whole: b"",
        lambda whole: whole.replace(b'"bytes": [', b'"bytes": [0, ', 1),
        lambda whole: whole.replace(b"rows as chat", b"rows as cats", 1),
        lambda whole: b"[]\n" + whole.split(b"\n", 1)[1],
    ],
)
def test_what_is_not_whole_is_made_anew(tmp_path: Path, own_model: Path, own_data: Path, damage: Callable[[bytes], bytes]) -> None:
    task = _task(tmp_path, own_data)
    encoded, _ = _loaded(task, own_model)
    (file,) = _kept(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert row_cache.load(file) is None
    assert _loaded(task, own_model)[0] == encoded
    assert json.loads(file.read_bytes().split(b"\n")[0]) == json.loads(whole.split(b"\n")[0])


def test_data_that_changed_after_the_launch_is_refused_as_before(tmp_path: Path, own_model: Path, own_data: Path) -> None:
    task = _task(tmp_path, own_data)
    _loaded(task, own_model)
    own_data.write_text(own_data.read_text() + "\n")
    with pytest.raises(WorkerError, match="differs from the one this run was launched with"):
        _loaded(task, own_model)
    own_data.unlink()
    with pytest.raises(WorkerError, match="not on this node"):
        _loaded(task, own_model)


def test_rows_with_the_time_of_their_launch_are_not_kept(tmp_path: Path, own_model: Path, own_data: Path) -> None:
    path = own_model / "chat_template.jinja"
    path.write_text("{{ strftime_now('%d %b %Y') }}" + path.read_text())
    _, notes = _loaded(_task(tmp_path, own_data), own_model)
    assert any("time of the launch" in note for note in notes) and not _kept(tmp_path)


def test_data_of_the_hub_has_no_key(tmp_path: Path, own_model: Path, own_data: Path) -> None:
    task = _task(tmp_path, own_data)
    task.run["data"]["train"] = {"path": "org/data", "kind": "hub", "revision": None, "sha256": None}
    assert row_cache.file_of(task, str(own_model)) is None
    assert row_cache.file_of(_task(tmp_path, own_data), "org/model-that-is-not-here") is None


def test_a_full_disk_keeps_nothing_and_ends_nothing(
    tmp_path: Path, own_model: Path, own_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(1, 1, 10**9))
    assert _loaded(_task(tmp_path, own_data), own_model)[0].train and not _kept(tmp_path)


def test_the_oldest_go(tmp_path: Path, own_model: Path, own_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_cache, "_MOST_FILES", 2)
    first, *others = (_task(tmp_path, own_data, train__seq_len=length) for length in (100, 120, 140))
    _loaded(first, own_model)
    _loaded(others[0], own_model)
    for file in _kept(tmp_path):  # a clock of files goes on in steps of milliseconds
        os.utime(file, (1, 1))
    _loaded(first, own_model)  # it was read: now the other one is older
    _loaded(others[1], own_model)
    assert _kept(tmp_path) == sorted(row_cache.file_of(task, str(own_model)) or Path() for task in (first, others[1]))
