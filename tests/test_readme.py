"""What the README says of itself is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from homelab.checks import registry, report
from homelab.cli.commands import app

pytestmark = pytest.mark.timeout(20)

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_list_of_checks_is_the_registry() -> None:
    found = re.search(r"<!-- homelab preflight --list -->\n(.*?)<!-- end -->\n", README, re.DOTALL)
    assert found is not None
    assert found[1] == report.listing(registry.SUBJECTS), "run: homelab preflight --list, and put its output between the marks"


def test_every_command_is_named() -> None:
    for command in app.registered_commands:
        assert re.search(rf"\b{command.name}\b", README), command.name
