"""Names of files in commands that are printed."""

from __future__ import annotations

import shlex

import pytest

from homelab.controller.base.shell import file_word
from homelab.controller.run import shipped_files as shipped


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("-rf.toml", "./-rf.toml"),
        ("--help", "./--help"),
        ("a b.toml", "'a b.toml'"),
        ("- x.toml", "'./- x.toml'"),
        ("r/-x.toml", "r/-x.toml"),
    ],
)
def test_no_file_is_taken_for_an_option(name: str, word: str) -> None:
    assert file_word(name) == word
    assert not shlex.split(word)[0].startswith("-")
    assert shipped.launch({"recipe_file": name}) == f"launch {word}"
