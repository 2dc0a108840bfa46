"""The README and the guide (homelab/docs) say what is there: all checks, commands, recipes, and the files they name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import homelab
from homelab.cli.command_list import app
from homelab.controller.checks import presentation, registry
from tests import builders, limits

pytestmark = pytest.mark.timeout(20)

HOUSE = Path(homelab.__file__).parent
MAP = (HOUSE / "README.md").read_text(encoding="utf-8")
README = (HOUSE.parent / "README.md").read_text(encoding="utf-8")
GUIDE = {path.stem: path.read_text(encoding="utf-8") for path in (HOUSE / "docs").glob("*.md")}


def test_the_list_of_checks_is_the_registry() -> None:
    found = re.search(r"<!-- homelab preflight --list -->\n(.*?)<!-- end -->\n", GUIDE["preflight"], re.DOTALL)
    assert found is not None
    assert found[1] == presentation.listing(registry.SUBJECTS), "run: homelab preflight --list, and put its output between the marks"


def test_every_command_is_named() -> None:
    pages = "\n".join((README, *GUIDE.values()))
    for command in app.registered_commands:
        assert re.search(rf"\bhomelab {command.name}\b", pages), f"no page of homelab/docs names: homelab {command.name}"
    assert "homelab bench SUITE.toml" in pages and "homelab bench card" in pages and "homelab lab up" in pages


def test_every_extra_of_the_controller_is_named() -> None:
    extras = tomllib.loads((HOUSE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    table = GUIDE["install"].partition("Some commands need an extra")[2].partition("\n\n## ")[0]
    assert set(extras) - {"worker", "unsloth", "dev"} == set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def test_what_is_sent_to_the_project_has_a_page() -> None:
    page = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "homelab bench card" in page and "homelab/controller/planning/speed/measured_cards.jsonl" in page and "CONTRIBUTING.md" in README
    files = re.findall(r"`((?:\w+/)+[\w.-]+)`", page)
    assert len(files) > 30 and [file for file in files if not (HOUSE / file).exists() and not (HOUSE.parent / file).exists()] == []


def test_every_file_that_the_guide_names_exists() -> None:
    named = {
        file for page in (README, *GUIDE.values()) for file in re.findall(r"(?<![\w./~-])((?:homelab|scripts|tests)/[\w./-]*\w)", page)
    }
    assert len(named) > 15 and [file for file in named if not (HOUSE.parent / file).exists()] == []


def test_every_file_on_the_map_exists() -> None:
    files = re.findall(r"`((?:\w+/)+\w+\.(?:py|toml))`", MAP)
    assert len(files) > 40
    assert [file for file in files if not (HOUSE / file).is_file() and not (HOUSE.parent / file).is_file()] == []


def test_the_map_lists_the_rooms_in_their_order() -> None:
    table = MAP.partition("| room |")[2].partition("\n\n")[0]
    rooms = [
        name.removesuffix("/").removesuffix(".py")
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([\w/.]+)`", line.split("|")[1])
    ]
    assert rooms == ["shared", "node", "worker", *(f"controller/{room}" for room in limits.ROOMS), "lab", "cli"]


def test_every_recipe_and_suite_is_listed_and_every_listed_one_is_there() -> None:
    folder = HOUSE.parent / "recipes"
    for path in (*builders.PROJECT_RECIPES, *builders.PROJECT_SUITES):
        assert str(path.relative_to(folder)) in GUIDE["recipe"], f"homelab/docs/recipe.md: add {path.relative_to(folder)}"
    named = set(re.findall(r"\brecipes/((?:[\w-]+/)?[\w-]+\.toml)", "\n".join((README, *GUIDE.values()))))
    assert named and [name for name in named if not (folder / name).is_file()] == []
