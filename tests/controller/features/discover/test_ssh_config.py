"""The names of an ssh_config."""

from __future__ import annotations

import pytest

from homelab.controller.features.discover import sources

FILES = {
    "more/*": ["Host pi\n  User me\n", "host=nas\nInclude again\n"],
    "again": ["Host deep # not a name\n"],
    "loop": ["Host once\nInclude loop\n"],
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('Host tower laptop\n  HostName 192.0.2.1\nHOST "old box" tower\n', ["tower", "laptop", "old box"]),
        ("Host * !bad *.lan a?c\n# Host no\nHostName no\nHost yes\n", ["yes"]),
        ("Host first\n  Include more/*\nMatch all\n  Include again\n", ["first", "pi", "nas", "deep"]),
        ("Include loop", ["once"]),
        ('Host "unfinished\nHost next', ["next"]),
        ("", []),
    ],
)
def test_names(text: str, names: list[str]) -> None:
    assert sources.host_names(text, lambda pattern: FILES.get(pattern, [])) == names
