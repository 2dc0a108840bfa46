"""On PyPI the name `homelab` is another program: no text of ours may have an installer look it up there."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import homelab

ROOT = Path(homelab.__file__).parents[1]
INSTALLER = re.compile(r"(?<![\w.-])(?:pip3?|pipx|uvx|uv|poetry|pdm)(?![\w-])(?P<rest>[^\n;&|`#]*)")
VERBS = {"install", "add", "run", "inject", "download", "upgrade"}
NAME = re.compile(r"homelab(?:-trainer)?(?:\[[\w,-]*\])?(?:[=<>~!]=?[\w.]*)?")
FILES = [
    ROOT / name
    for name in subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    if name.endswith((".py", ".md", ".toml", ".txt", ".html", ".j2")) or name.startswith("scripts/")
]


def looked_up(text: str) -> list[str]:
    """The commands that have an installer look the name up. `uvx --from FILE homelab` runs a program of the file."""
    found = []
    for command in INSTALLER.finditer(text):
        words = [word for word in re.split(r"[\s'\",()]+", command["rest"]) if word]
        if "--from" in words:
            words = words[words.index("--from") + 1 :][:1]
        elif not command[0].startswith("uvx") and not VERBS & set([word for word in words if not word.startswith("-")][:2]):
            continue
        if any(NAME.fullmatch(word) for word in words):
            found.append(command[0].strip())
    return found


@pytest.mark.parametrize(
    "line",
    [
        "pip install homelab", "pip install 'homelab[bench]'", "python -m pip install -U homelab", "pipx install homelab", "pipx run homelab init", "uvx homelab demo",
        "uv tool install homelab", "uv add homelab==0.2", "uvx --from 'homelab[worker]' homelab demo", "/usr/bin/python3 -m pip install \"homelab[push]\" torch",
        '["pip", "install", "homelab"]', "uv pip install homelab-trainer",
    ],
)  # fmt: skip
def test_the_rule_sees_a_name_that_is_looked_up(line: str) -> None:
    assert looked_up(line), line


@pytest.mark.parametrize(
    "line",
    [
        "pip install '.[bench]'", "pipx install ./homelab_trainer-0.1.0-py3-none-any.whl && homelab demo", "uvx --from './homelab_trainer-1.whl[worker]' homelab_demo",
        "homelab setup --upgrade", "pip install torch; homelab preflight", "git clone THIS-REPOSITORY homelab && cd homelab", "~/.homelab/env/bin/pip install torch",
    ],
)  # fmt: skip
def test_the_rule_lets_files_and_folders_pass(line: str) -> None:
    assert not looked_up(line), line


def test_no_text_of_ours_has_the_name_looked_up() -> None:
    assert len(FILES) > 500
    found = [
        f"{path.relative_to(ROOT)}: {hit}"
        for path in FILES
        if path != Path(__file__)
        for hit in looked_up(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_the_package_has_the_name_that_the_code_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == homelab.__distribution__ != "homelab"
    assert project["scripts"] == {"homelab": "homelab.cli.main:main"}


def test_what_is_offered_in_place_of_an_extra_is_the_package_itself() -> None:
    from homelab.controller.base import package

    assert package.install("zeroconf>=1") == f"{sys.executable} -m pip install 'zeroconf>=1'"
