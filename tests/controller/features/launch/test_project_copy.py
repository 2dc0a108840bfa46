"""The folder of a program: what of it is sent, and that nothing is written into it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import Hint
from homelab.controller.config.load import load_recipe
from homelab.controller.config.program_command import WRAPPER, parsed
from homelab.controller.features.launch import project_copy

TREE = ("train.py", "lib/model.py", "notes.txt", ".env", ".venv/x.py", "__pycache__/train.pyc", "runs/a/state.json", "big.bin")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in TREE:
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text("x = 1\n")
    return tmp_path / "project"


def test_hidden_files_and_what_programs_make_stay_here(folder: Path) -> None:
    assert project_copy.files(folder) == ["big.bin", "lib/model.py", "notes.txt", "train.py"]


def test_git_says_what_belongs_to_it(folder: Path) -> None:
    (folder / ".gitignore").write_text("*.bin\nruns/\n__pycache__/\n.venv/\n")
    subprocess.run(["git", "-C", str(folder), "init", "-q"], check=True)
    assert project_copy.files(folder) == ["lib/model.py", "notes.txt", "train.py"]


@pytest.mark.parametrize("is_repository", [True, False])
@pytest.mark.parametrize("has_git", [True, False])
def test_a_folder_is_sent_without_what_it_names_and_what_trainings_make(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_repository: bool, has_git: bool
) -> None:
    for name in (
        "models/__init__.py",
        "models/net.py",
        "lib/outputs/a.py",
        "outputs/b.txt",
        "env/pyvenv.cfg",
        "env/lib/c.py",
        "data/d.csv",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x = 1\n")
    (folder / ".gitignore").write_text("data/\n*.bin\n")
    if is_repository:
        subprocess.run(["git", "-C", str(folder), "init", "-q"], check=True)
    subprocess.run(["git", "init", "-q", str(folder / "other")], check=True)
    (folder / "other" / "e.py").write_text("x = 1\n")
    if not has_git:
        monkeypatch.setenv("PATH", str(folder))
    ignored = [] if has_git else ["big.bin", "data/d.csv"]
    kept = ["lib/model.py", "lib/outputs/a.py", "models/__init__.py", "models/net.py", "notes.txt", "other/e.py", "train.py"]
    assert project_copy.files(folder) == sorted([*kept, *ignored])


def test_the_recipe_is_a_script_beside_a_copy(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    with project_copy.recipe_of(parsed(["python", "train.py", "--lr", "1"]), folder) as file:
        recipe = load_recipe(file)
        assert (
            recipe.script
            and recipe.script.path == WRAPPER
            and recipe.script.args == ("--lr", "1")
            and "lib/model.py" in recipe.script.files
        )
        assert file.stem == "train" and (file.parent / "lib/model.py").is_file() and file.parent != folder
    assert not file.exists() and sorted(folder.rglob("*")) == before


def test_too_much_and_nothing_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="does not exist"), project_copy.recipe_of(parsed(["python", "none.py"]), folder):
        pass
    monkeypatch.setattr(project_copy, "MOST_FILES", 4)
    with (
        pytest.raises(InputError, match="this folder has 4 files") as refused,
        project_copy.recipe_of(parsed(["python", "train.py"]), folder),
    ):
        pass
    assert "the largest: " in refused.value.where and ".gitignore" in str(refused.value.hint)


@pytest.mark.parametrize("name", ["caf\udce9.txt", "caf\udce9's/part one.txt"])
def test_a_name_that_is_no_utf8_is_refused_with_the_command_that_renames_it(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    (folder / "café.txt").write_text("mine")
    with pytest.raises(InputError, match="not UTF-8") as refused, project_copy.recipe_of(parsed(["python", "train.py"]), folder):
        pass
    assert refused.value.where.startswith(f"{folder}/caf\ufffd")
    assert isinstance(refused.value.hint, Hint)
    subprocess.run(["sh", "-c", refused.value.hint.commands[0]], check=True, timeout=20, cwd="/")
    with project_copy.recipe_of(parsed(["python", "train.py"]), folder) as file:
        script = load_recipe(file).script
        assert script is not None and name.replace("\udce9", "é").replace("café.txt", "_café.txt") in script.files
    assert (folder / "café.txt").read_text() == "mine"


def test_a_word_that_is_no_utf8_is_refused(folder: Path) -> None:
    words = ["python", "train.py", "--data", "/data/caf\udce9"]
    with pytest.raises(InputError, match="not UTF-8") as refused, project_copy.recipe_of(parsed(words), folder):
        pass
    assert refused.value.hint and "caf\ufffd" in refused.value.where
