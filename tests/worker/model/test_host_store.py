"""The blocks of streamed layers on a host's disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from homelab.worker.model import host_store


def test_two_processes_do_not_write_into_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat may load the layers of a stage while an attempt of the same run does."""
    ours, theirs, synced = torch.full((5000,), 1, dtype=torch.uint8), torch.full((5000,), 2, dtype=torch.uint8), os.fsync
    found = []

    def meanwhile(number: int) -> None:
        synced(number)
        monkeypatch.setattr(os, "fsync", synced)
        found.append(host_store._on_disk(theirs, tmp_path / "layers", 0))

    monkeypatch.setattr(os, "fsync", meanwhile)
    assert host_store._on_disk(ours, tmp_path / "layers", 0).equal(ours)
    assert found[0].equal(theirs)
    assert not list(tmp_path.iterdir())
