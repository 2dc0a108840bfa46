"""Root in a container may make no namespaces, or write no cgroups: the lab says so, and what needs them is skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.lab import Lab, cgroup, namespaces
from homelab.lab.cgroup import Hierarchies, Hierarchy
from tests.lab.conftest import namespaces_missing

pytestmark = pytest.mark.timeout(30)

WHOLE = Hierarchies(Hierarchy(Path("/sys/fs/cgroup"), 2), Hierarchy(Path("/sys/fs/cgroup"), 2))


@pytest.mark.parametrize(
    ("hierarchies", "unshare", "words"),
    [
        (Hierarchies(None, None), "", "no cgroup tree that root may write"),
        (Hierarchies(None, WHOLE.freezer), "", "no cgroup tree that root may write"),
        (WHOLE, "unshare failed: Operation not permitted", "unshare failed: Operation not permitted"),
        (WHOLE, "", ""),
    ],
    ids=["no tree", "no CPU limits", "no namespaces", "all"],
)
def test_what_root_may_not_make(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hierarchies: Hierarchies, unshare: str, words: str
) -> None:
    def call(*arguments: str) -> str:
        if unshare:
            raise HomelabError(unshare, where="this machine", hint="-")
        return ""

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces, "require", lambda *names: None)
    monkeypatch.setattr(namespaces, "call", call)
    monkeypatch.setattr(cgroup, "find_hierarchies", lambda: hierarchies)
    assert words in (why := namespaces_missing.__wrapped__()) and bool(words) == bool(why)
    if words:
        with pytest.raises(HomelabError, match=words) as refused:
            Lab.up(tmp_path / "lab", nodes=1, backend="namespaces", cpu=[0.5])
        assert "--backend loopback" in str(refused.value) and not (tmp_path / "lab").exists()
