"""The text files of diagnose: they are data of the package, travel with a supervisor, and say nothing that the code does not know."""

from __future__ import annotations

import io
import re
import tarfile
import tomllib
from pathlib import Path

import pytest

import homelab
from homelab.controller.base.errors import InputError
from homelab.controller.diagnose import data_file, rules, topic_index
from homelab.controller.remote import ship

ROOT = Path(homelab.__file__).parent
FILES = sorted((ROOT / "controller" / "diagnose").rglob("*.toml"))
REPOSITORY = ROOT.parent


def test_every_topic_file_is_listed() -> None:
    assert {file.stem for file in (ROOT / "controller" / "diagnose" / "topics").iterdir()} == set(topic_index.FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_value_is_left_out(file: Path) -> None:
    """{TORCH} and the like are put in when the file is loaded; a name with a spelling mistake would stay."""
    document = data_file.load(str(file.relative_to(ROOT / "controller" / "diagnose")))
    assert not re.search(r"\{[A-Z_]{3,}(\.\w+)?\}", str(document))


@pytest.mark.parametrize(
    ("name", "right", "wrong", "said"),
    [
        ("rules/card.toml", "retryable = false", "retriable = false", 'line {line}, rules.#1.retriable: unknown key "retriable". Did you mean "retryable"?'),
        ("rules/card.toml", "specificity = 97\n", "", 'line 6, rules.#1: "specificity" is missing'),
        ("rules/card.toml", "'FATAL: kernel", "'FATAL(: kernel", "line 6, rules.#1: extension-kernels cannot be used: 'FATAL(: kernel"),
        ("rules/card.toml", 'title = "a package', 'title = 3 # "a package', "line 6, rules.#1: extension-kernels cannot be used: title is no text"),
        ("endings.toml", "retryable = ", "retryable ", "this file is not valid TOML: Expected '='"),
        ("topics/gpu.toml", "seen = [", "sen = [", 'line {line}, topics.#1.sen: unknown key "sen". Did you mean "seen"?'),
        ("topics/gpu.toml", 'title = "The card', 'title = 3 # "The card', "title is neither a text nor a list of texts"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch, name: str, right: str, wrong: str, said: str) -> None:
    text = data_file._text(name)
    assert right in text
    line = text.count("\n", 0, text.index(right)) + 1
    monkeypatch.setattr(data_file, "_text", lambda asked: text.replace(right, wrong, 1))
    with pytest.raises(InputError) as raised:
        topic_index.load_topics("gpu") if name.startswith("topics") else rules.load(name)
    assert said.format(line=line) in raised.value.message or said in raised.value.message
    assert raised.value.where.endswith(f"homelab/controller/diagnose/{name}")


@pytest.mark.parametrize("file", [file for file in FILES if file.parent.name == "rules"], ids=lambda file: file.stem)
def test_each_pattern_is_a_regular_expression_by_itself(file: Path) -> None:
    """A command compiles the patterns of a rule as one: "(a" and "b)" would pass."""
    patterns = [pattern for rule in tomllib.loads(file.read_text())["rules"] for pattern in rule.get("patterns", ())]
    assert len(patterns) > 10 and all(re.compile(pattern) for pattern in patterns)


def test_a_supervisor_on_a_node_has_the_text_files() -> None:
    with tarfile.open(fileobj=io.BytesIO(ship.PACKAGE.archive())) as archive:
        names = set(archive.getnames())
    assert {f"homelab/{file.relative_to(ROOT)}" for file in FILES} <= names


def test_an_installed_package_has_the_text_files() -> None:
    patterns = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["homelab"]
    found = {file for pattern in patterns for file in ROOT.glob(pattern)}
    assert set(ROOT.rglob("*.toml")) <= found
