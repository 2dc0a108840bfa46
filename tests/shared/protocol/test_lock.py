"""A lock ends with its process, and asking for it takes it from nobody."""

from __future__ import annotations

import fcntl
from pathlib import Path

from homelab.shared.protocol import lock


def test_a_held_lock_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "supervisor.lock"
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert lock.is_held(file)
    assert not lock.is_held(file)


def test_a_file_that_is_not_there_is_held_by_nobody(tmp_path: Path) -> None:
    assert not lock.is_held(tmp_path / "x")
