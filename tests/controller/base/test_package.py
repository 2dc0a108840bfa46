"""The command of a hint that installs a package: it works in the environment that this program is in."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from homelab.controller.base import package
from homelab.controller.base.errors import HomelabError
from homelab.lab import model


def test_an_environment_without_pip_is_served_by_uv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert package.install("apprise>=1") == f"{sys.executable} -m pip install 'apprise>=1'"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert package.install("apprise>=1") == f"uv pip install --python {sys.executable} 'apprise>=1'"
    with pytest.raises(HomelabError, match="the package safetensors is not installed") as refused:
        model.is_complete(tmp_path)
    assert refused.value.hint == f"uv pip install --python {sys.executable} safetensors"
