"""What is typed after a command is said back by its error without what a terminal would obey, in one line each."""

from __future__ import annotations

import pytest

from scripts.practice.desk import Desk

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("verb", [["status"], ["explain"], ["preflight", "--only"]], ids=" ".join)
@pytest.mark.parametrize("word", ["x\x1b[31m\x1b]0;owned\x07", "x\nfix:   rm -r ~", 5000 * "x"], ids=["escapes", "lines", "long"])
def test_an_argument_steers_no_terminal(quiet_desk: Desk, verb: list[str], word: str) -> None:
    quiet_desk.write("cluster.toml", f'[[nodes]]\nname = "a"\nhost = "local"\nworkdir = "{quiet_desk.folder / "work"}"\n')
    shown = quiet_desk.homelab(*verb, word, code=2).stderr
    lines = [line for line in shown.splitlines() if not line.startswith((". ", "  "))]
    assert shown.replace("\n", "").isprintable() and len(shown) < 6000, shown[:500]
    assert [line.partition(":")[0] for line in lines] == ["error", "where", "fix"], shown
