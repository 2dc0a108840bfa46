"""Errors of the libraries that write, in the words of the system."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from homelab.worker import errors


def test_a_disk_that_refused_a_write_is_named_by_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = RuntimeError("basic_ios::clear: iostream error")  # as torch's zip writer says it
    assert errors.disk_fault(OSError(30, "Read-only file system"), tmp_path) == "Read-only file system"
    assert errors.disk_fault(RuntimeError("I/O error: Permission denied (os error 13) at path x"), tmp_path) == "Permission denied"
    assert errors.disk_fault(odd, tmp_path) is None
    assert errors.disk_fault(odd, tmp_path / "removed") == "No such file or directory"
    monkeypatch.setattr(shutil, "disk_usage", lambda root: SimpleNamespace(free=1000))
    assert errors.disk_fault(odd, tmp_path) == "No space left on device"
