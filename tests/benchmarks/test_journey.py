"""The terminal of the benchmark of the whole way: what a person reads there, what they are asked, and how a command ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.journey import Person

pytestmark = pytest.mark.timeout(60)

# A dashboard that draws over itself, on the same screen or on another one.
_DASHBOARD = """
import sys
from rich.console import Console
from rich.live import Live
from rich.text import Text
console = Console(width=80)
console.print("run one is starting")
with Live(Text("step 0"), console=console, auto_refresh=False, screen=sys.argv[1] == "screen") as live:
    for step in range(1, 51):
        live.update(Text(f"step {step}\\nrank 0  trains" + "\\nrank 1  trains" * (20 < step < 50)), refresh=True)
console.print("Next: homelab chat")
"""
_QUESTIONS = """
for i in 1 2; do printf 'Save this key? '; read -r key; echo key=$key; done
printf 'Is this machine a node, too? '; read -r node; echo node=$node
"""


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    (tmp_path / "dashboard.py").write_text(_DASHBOARD)
    person = Person(tmp_path, tmp_path)
    yield person
    person.close()


def _read(person: Person, command: str) -> list[str]:
    """The lines that stay of a command, without how long it took."""
    before = len(person.transcript)
    person.type(command)
    return person.transcript[before:].splitlines()[1:-2]


@pytest.mark.parametrize("screen", ["screen", "lines"])
def test_the_last_picture_stays(person: Person, screen: str) -> None:
    shown = _read(person, f"{sys.executable} dashboard.py {screen}")
    assert shown == ["run one is starting", *([] if screen == "screen" else ["step 50", "rank 0  trains"]), "Next: homelab chat"]
    assert person.words_printed == len(" ".join(shown).split())


def test_lines_that_have_left_the_screen_count(person: Person) -> None:
    assert _read(person, "seq 1 2000") == [str(number) for number in range(1, 2001)]
    assert _read(person, "echo again") == ["again"], "nothing of the command before"


def test_each_question_is_answered(person: Person, tmp_path: Path) -> None:
    (tmp_path / "ask").write_text(_QUESTIONS)
    shown = _read(person, "sh ask")
    assert [line.rpartition(" ")[2] for line in shown if "=" in line] == ["key=y", "key=y", "node=n"]
    assert person.questions == ["Save this key?", "Save this key?", "Is this machine a node, too?"]


def test_a_command_that_fails_ends_the_walk(person: Person) -> None:
    with pytest.raises(SystemExit, match=r"exit code 3\nwhere: sh -c 'exit 3'"):
        person.type("sh -c 'exit 3'")
