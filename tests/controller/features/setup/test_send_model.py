"""A model of the hub, from this machine to a node: its files, and what the recipe calls it."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.controller.features.setup import send_model
from homelab.controller.features.setup.model_source import ModelSource, part_of
from homelab.controller.features.setup.setup_plan import SetupOptions
from homelab.shared.protocol import hub_cache
from tests.fakes import FakeFleet

COMMIT = "b" * 40


def test_the_recipe_s_revision_is_known_on_the_node_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    (tmp_path / "config.json").write_text("{}")
    files = {part_of(tmp_path / "config.json"): tmp_path / "config.json"}
    fleet = FakeFleet(tmp_path, ["tower"])

    def run(revision: str, *, check: bool = False) -> send_model.ModelDone:
        how = SetupOptions(check, upgrade=False, fetches_here=True, between_nodes=False)
        source = ModelSource("org/name", COMMIT, files, "org/name", revision)
        done, errors = send_model.run(fleet, ["tower"], source, how, lambda text: None)
        assert not errors
        return done["tower"]

    assert run("v1.0", check=True).missing == ("config.json", "refs/v1.0") and hub_cache.snapshot("org/name", "v1.0") is None
    assert run("v1.0").text.startswith("sent 2 bytes of the model")
    assert hub_cache.snapshot("org/name", "v1.0") == str(Path(hub_cache.snapshots("org/name")) / COMMIT)
    assert not run("v1.0").missing and hub_cache.snapshot("org/name", None) is None
    assert run("main", check=True).text.endswith("; to write: refs/main") and run("main").text.endswith("; written: refs/main")
    assert hub_cache.snapshot("org/name", None) is not None
