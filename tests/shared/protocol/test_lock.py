"""A lock ends with its process, and asking for it takes it from nobody."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from homelab.shared.protocol import lock


def test_a_held_lock_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "supervisor.lock"
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert lock.is_held(file)
    assert not lock.is_held(file)


def test_a_file_that_is_not_there_is_held_by_nobody(tmp_path: Path) -> None:
    assert not lock.is_held(tmp_path / "x")


def test_who_does_not_wait_has_it_alone_or_with_those_who_share_it(tmp_path: Path) -> None:
    file = tmp_path / "base.lock"
    with (
        lock.without_waiting(file, shared=True) as one,
        lock.without_waiting(file, shared=True) as other,
        lock.without_waiting(file) as alone,
    ):
        assert (one, other, alone) == (True, True, False)
    with lock.without_waiting(file) as alone, lock.without_waiting(file) as second, lock.without_waiting(file, shared=True) as shared:
        assert (alone, second, shared) == (True, False, False)


def test_a_lock_whose_file_was_removed_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, flock = tmp_path / "base.lock", fcntl.flock

    def late(descriptor: int, how: int) -> None:
        file.unlink()  # by who had it alone, after this one has opened it
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock.without_waiting(file) as is_mine:
        assert not is_mine
