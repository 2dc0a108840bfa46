"""What an open project has beside its code: each file says what is true of this tree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import typer.main
import yaml

import homelab
from homelab.cli.command_list import app

ROOT = Path(homelab.__file__).parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
CHANGES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_the_newest_version_of_the_changelog_is_that_of_the_package() -> None:
    versions = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", CHANGES, re.MULTILINE)
    numbered = [(name, date) for name, date in versions if name != "Unreleased"]
    assert numbered[0][0] == homelab.__version__
    assert all(date for _, date in numbered)
    assert [date for _, date in numbered] == sorted((date for _, date in numbered), reverse=True)
    assert CHANGES.count("\n## ") == len(versions), "a heading of another form"


def test_the_changelog_has_the_kinds_of_keep_a_changelog() -> None:
    for section in CHANGES.split("\n## ")[1:]:
        kinds = re.findall(r"^### (.+)$", section, re.MULTILINE)
        assert kinds == [kind for kind in KINDS if kind in kinds], section.partition("\n")[0]


@pytest.mark.parametrize("name", ["CHANGELOG.md", "SECURITY.md"])
def test_every_command_that_is_named_exists(name: str) -> None:
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"`homelab ([a-z]+)", (ROOT / name).read_text(encoding="utf-8")))
    assert named and named - commands == set()


@pytest.mark.parametrize("form", [form for form in FORMS if form.name != "config.yml"], ids=lambda form: form.stem)
def test_an_issue_form_asks_for_the_output_of_doctor(form: Path) -> None:
    told = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(told)
    fields = {part["id"]: part for part in told["body"] if part["type"] != "markdown"}
    assert all(part["attributes"]["label"] for part in fields.values())
    doctor = fields["doctor"]["attributes"]
    assert doctor["label"] == "homelab doctor NODE" and doctor["render"] == "text"
    assert "masked" in doctor["description"] and "read the output before you publish it" in doctor["description"]
    if form.stem == "fault":
        assert fields["doctor"]["validations"]["required"]


def test_the_hooks_of_a_commit_are_those_of_the_suite() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert repository["repo"] == "local", "another's repository would bring versions of its own"
    programs = {" ".join(hook["entry"].split()[:2]) for hook in repository["hooks"]}
    suite = (ROOT / "scripts" / "test").read_text(encoding="utf-8")
    assert programs == {".venv/bin/ruff check", ".venv/bin/ruff format"}
    assert all(program in suite for program in programs)


def test_the_metadata_of_the_package_is_whole() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"description", "readme", "license", "authors", "keywords", "classifiers"} <= set(project)
    pythons = [
        line.rpartition(" :: ")[2] for line in project["classifiers"] if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", line)
    ]
    assert pythons[0] == project["requires-python"].removeprefix(">=")
    assert project["classifiers"] == sorted(project["classifiers"]) and project["keywords"] == sorted(project["keywords"], key=str.lower)
