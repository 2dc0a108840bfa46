"""Which of two diagnoses of one attempt is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.controller.attempt import diagnosis_store
from homelab.controller.base.hint import Hint
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.run.paths import RunPaths

pytestmark = pytest.mark.timeout(30)


def said(cause: str) -> Diagnosis:
    return Diagnosis(cause=cause, title=f"it is {cause}", first_node="node1", hint=Hint("mend it"), retryable=True)


def kept_of(folder: Path, *causes: str) -> str:
    """Diagnoses are made in this order; what stands in the file in the end."""
    paths = RunPaths(folder / "-".join(causes))
    for cause in causes:
        diagnosis_store.keep(paths, 1, said(cause), {})
    found = diagnosis_store.read(paths, 1)
    assert found is not None
    return found.diagnosis.cause


def test_that_a_watcher_is_gone_replaces_nothing_that_was_known(tmp_path: Path) -> None:
    for known in ("silent-rank", "connection-lost", "unconnected", "killed", "alone", "unreachable"):
        assert kept_of(tmp_path, known, "vanished") == known
    assert kept_of(tmp_path, "vanished", "vanished") == "vanished"


def test_and_gives_way_to_a_reason(tmp_path: Path) -> None:
    assert kept_of(tmp_path, "vanished", "killed") == "killed"
    assert kept_of(tmp_path, "vanished", "connection-lost") == "vanished", "who lost a peer knows less"


def test_a_reason_is_kept(tmp_path: Path) -> None:
    assert kept_of(tmp_path, "connection-lost", "killed", "connection-lost") == "killed"
    assert kept_of(tmp_path, "disk-full", "alone") == "disk-full"
