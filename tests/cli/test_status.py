"""Options of `homelab status` that contradict each other."""

from __future__ import annotations

import pytest

from homelab.cli import main
from homelab.controller.base.errors import EXIT_INPUT


def test_one_look_and_staying_to_the_end_are_not_both_possible(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["status", "--wait", "--once"]) == EXIT_INPUT
    said = capsys.readouterr().err
    assert "--once is one look, and --wait stays until the end" in said and "leave one of them out" in said
