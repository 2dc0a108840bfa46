"""What is missing on this machine is named with the command of its own distribution."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.lab import tools


@pytest.mark.parametrize(
    ("manager", "hint"),
    [
        ("apt", "sudo apt install openssh-server iproute2"),
        ("dnf", "sudo dnf install openssh-server iproute iproute-tc"),
        ("pacman", "sudo pacman -S openssh iproute2"),
        ("", "install the packages of this system that have sshd, ip, tc"),
    ],
)
def test_the_command_is_that_of_the_distribution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, manager: str, hint: str) -> None:
    monkeypatch.setattr(tools, "_SEARCH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if manager:
        (tmp_path / manager).write_text("#!/bin/sh\n")
        (tmp_path / manager).chmod(0o755)
    with pytest.raises(HomelabError) as missing:
        tools.require("sshd", "ip", "tc")
    assert missing.value.hint == hint and "sshd, ip, tc" in missing.value.message
