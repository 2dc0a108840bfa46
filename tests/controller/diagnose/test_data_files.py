"""The text files of diagnose: they are data of the package, travel with a supervisor, and say nothing that the code does not know."""

from __future__ import annotations

import io
import re
import tarfile
import tomllib
from pathlib import Path

import pytest

import homelab
from homelab.controller.diagnose import data_file, topic_index
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


def test_a_misspelt_key_is_no_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"id": "a", "title": "b", "seen": [], "cause": "c", "do": [], "chekcs": []}
    monkeypatch.setattr(data_file, "load", lambda name: {"heading": "h", "topics": [entry]})
    with pytest.raises(AssertionError, match="chekcs"):
        topic_index.load_topics("network")


def test_a_supervisor_on_a_node_has_the_text_files() -> None:
    with tarfile.open(fileobj=io.BytesIO(ship.package()[1])) as archive:
        names = set(archive.getnames())
    assert {f"homelab/{file.relative_to(ROOT)}" for file in FILES} <= names


def test_an_installed_package_has_the_text_files() -> None:
    patterns = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["homelab"]
    found = {file for pattern in patterns for file in ROOT.glob(pattern)}
    assert set(ROOT.rglob("*.toml")) <= found
