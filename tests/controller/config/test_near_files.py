"""A name of a file with a slip in it: the files that may be meant are named, and what they are called is what can be typed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.config import load

FILES = (
    "recipes/demo.toml",
    "recipes/llama7b-lora.toml",
    "recipes/bench/smollm-full.toml",
    "recipes/my.toml",
    "mine.toml",
    "of mine/tower.toml",
    "cluster.toml",
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "recipes/data").mkdir()
    (tmp_path / "recipes/data/dmeo.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hint(typed: str) -> str:
    with pytest.raises(InputError, match="there is no recipe here") as caught:
        load.load_recipe(Path(typed))
    assert caught.value.where == str(Path(typed))
    return str(caught.value.hint)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("recipes/dmeo.toml", "recipes/demo.toml"), ("recipes/my.tml", "recipes/my.toml"), ("recipes/demo", "recipes/demo.toml"),
        ("recipes/Demo.TOML", "recipes/demo.toml"), ("demo.toml", "recipes/demo.toml"), ("recipe/demo.toml", "recipes/demo.toml"),
        ("recipes/smollm-full.toml", "recipes/bench/smollm-full.toml"), ("recipes/llama7b_lora.toml", "recipes/llama7b-lora.toml"),
        ("mien.toml", "mine.toml"), ("of mine/towr.toml", "of mine/tower.toml"), ("./recipes/demoo.toml", "recipes/demo.toml"),
    ],
)  # fmt: skip
def test_the_file_that_is_meant_comes_first(folder: Path, typed: str, meant: str) -> None:
    words = shlex.split(hint(typed).removeprefix("did you mean ").partition("?")[0])
    assert words[0] == meant and all((folder / word).is_file() for word in words if word != "or")


@pytest.mark.parametrize("typed", ["nowhere.toml", "recipes/zzz.toml", "/nowhere/at/all.toml", "x" * 300])
def test_where_none_is_near_the_list_is_named(typed: str) -> None:
    if len(typed) > 255:
        with pytest.raises(InputError, match="cannot be read: File name too long"):
            load.load_recipe(Path(typed))
    else:
        assert hint(typed) == "list the recipes with: ls recipes/"


def test_an_absolute_path_is_answered_by_one(folder: Path) -> None:
    assert str(folder / "recipes/demo.toml") in hint(str(folder / "recipes/dmeo.toml"))


def test_a_cluster_file_and_a_suite_too() -> None:
    with pytest.raises(InputError) as caught:
        load.load_cluster(Path("clsuter.toml"))
    assert "did you mean cluster.toml? Otherwise: homelab init" in str(caught.value.hint)
