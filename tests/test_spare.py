"""What is spare is played last, and left out where the time is over; the run says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import costs, spare

SAMPLE = """
import pathlib, pytest
def say(words):
    with open(pathlib.Path(__file__).with_name("played"), "a") as out: out.write(words + "\\n")
@pytest.fixture(scope="module")
def lab(): say("lab")
def test_is_spare(lab): say("spare")
@pytest.mark.parametrize("case", ["often", "seldom"])
def test_cases(lab, case): say(case)
"""
OPTIONS = """
import pathlib
from tests import spare
spare.FILE = pathlib.Path(__file__).with_name("spare.toml")
pytest_addoption = spare.add_option
def pytest_configure(config):
    config.addinivalue_line("markers", "spare: played last")
    if config.option.spare_until is not None: config.pluginmanager.register(spare.SpareTime(config.option.spare_until))
def pytest_collection_modifyitems(items): spare.mark(items, pathlib.Path(__file__).parent)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "options_here.py").write_text(OPTIONS)
    (tmp_path / "spare.toml").write_text('each_third_case = []\n[names]\n"test_sample.py" = ["test_is_spare", "test_cases[seldom]"]\n')
    return tmp_path


def played(folder: Path, *options: str) -> tuple[list[str], str]:
    """(what was played, in its order; what the run said)"""
    line = [sys.executable, "-m", "pytest", "-q", "-p", "options_here", "--rootdir", str(folder), "-c", "/dev/null", *options, str(folder)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTHONPATH"] = f"{costs.ROOT}{os.pathsep}{folder}"
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=60)
    file = folder / "played"
    return file.read_text().split() if file.exists() else [], done.stdout + done.stderr


def test_with_time_all_are_played_and_what_is_spare_comes_last(folder: Path) -> None:
    found, said = played(folder, "--spare-until", "1000")
    assert found == ["lab", "often", "spare", "seldom"] and "3 passed" in said and "left out" not in said


def test_without_time_it_is_left_out_and_its_lab_is_not_brought_up(folder: Path) -> None:
    found, said = played(folder, "--spare-until", "0")
    assert found == ["lab", "often"] and "1 passed, 2 skipped" in said
    assert "2 tests were left out, for this machine is slow" in said and "scripts/test spare" in said


@pytest.mark.parametrize("options", [(), ("-m", "spare")], ids=["no limit", "alone"])
def test_who_asks_for_them_has_them(folder: Path, options: tuple[str, ...]) -> None:
    found, said = played(folder, *options)
    assert {"spare", "seldom"} <= set(found) and ("often" in found) == (options == ()) and "skipped" not in said


def test_a_name_that_no_test_has_is_an_error(folder: Path) -> None:
    (folder / "spare.toml").write_text('each_third_case = []\n[names]\n"test_sample.py" = ["test_is_spare", "test_that_is_gone"]\n')
    found, said = played(folder)
    assert found == [] and "tests/spare.toml names what is not there: test_sample.py::test_that_is_gone" in said


def test_what_has_failed_is_played_alone_in_a_file_with_spare_ones(folder: Path) -> None:
    with (folder / "test_sample.py").open("a") as sample:
        sample.write("def test_fails():\n    say('fails')\n    assert False\n")
    assert "1 failed" in played(folder)[1]
    (folder / "played").unlink()
    found, said = played(folder, "--lf")
    assert found == ["fails"] and "1 failed" in said, said


def test_of_many_cases_each_third_is_always_played(folder: Path) -> None:
    many = """
import pathlib, pytest
@pytest.mark.parametrize("case", range(7))
def test_many(case): open(pathlib.Path(__file__).with_name("played"), "a").write(f"{case} ")
def test_alone(): open(pathlib.Path(__file__).with_name("played"), "a").write("alone ")
"""
    (folder / "test_sample.py").write_text(many)
    (folder / "spare.toml").write_text('each_third_case = ["test_sample.py"]\n[names]\n')
    found, said = played(folder, "--spare-until", "0")
    assert found == ["0", "3", "6", "alone"] and "4 tests were left out" in said


def test_every_file_is_there() -> None:
    assert [name for name in (*spare.named(), *spare.thinned()) if not (costs.ROOT / name).is_file()] == []
