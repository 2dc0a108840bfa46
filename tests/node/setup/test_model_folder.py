"""A model of the hub that setup brings: which commit a branch, a tag and `main` mean on this node afterwards."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import pytest

from homelab.node.setup import record
from homelab.shared.protocol import hub_cache
from tests.fakes import ask_node

DATA = b'{"model_type": "llama"}'
OLD, NEW = "a" * 40, "b" * 40
PIECE = {"name": "config.json", "sha256": hashlib.sha256(DATA).hexdigest(), "size": len(DATA), "offset": 0, "model": "org/name"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path / "huggingface/hub/models--org--name"


def sent(commit: str, revision: str) -> None:
    """All that `homelab setup --recipe` asks of this node."""
    request = {
        "model": "org/name",
        "commit": commit,
        "revision": revision,
        "files": {PIECE["name"]: PIECE["sha256"]},
        "workdir": "~/homelab",
    }
    ask_node("model-receive", {**PIECE, "commit": commit}, io.BytesIO(DATA))
    assert not ask_node("model-look", request).is_named
    ask_node("model-name", request)
    assert ask_node("model-look", request).is_named


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/7", "main"])
def test_the_revision_of_the_recipe_is_found_here_afterwards(cache: Path, revision: str) -> None:
    sent(NEW, revision)
    assert hub_cache.snapshot("org/name", revision) == str(cache / "snapshots" / NEW)
    assert hub_cache.snapshot("org/name", None) == (str(cache / "snapshots" / NEW) if revision == "main" else None)
    ask_node("setup-remove", {"workdir": "~/homelab"})
    assert not cache.exists()


def test_what_half_a_model_means_is_not_changed(cache: Path) -> None:
    ask_node("model-receive", {**PIECE, "size": 2 * len(DATA), "commit": NEW}, io.BytesIO(DATA))
    ask_node("model-receive", {**PIECE, "commit": NEW}, io.BytesIO(DATA))
    assert hub_cache.snapshot("org/name", None) is None


def test_a_commit_is_its_own_name(cache: Path) -> None:
    request = {"model": "org/name", "commit": NEW, "revision": NEW, "workdir": "~/homelab"}
    assert ask_node("model-look", request).is_named
    ask_node("model-name", request)
    assert not (cache / "refs").exists()


def test_an_older_main_is_replaced_and_comes_back_with_teardown(cache: Path) -> None:
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text(OLD)
    (cache / "snapshots" / OLD).mkdir(parents=True)
    sent(NEW, "main")
    sent("c" * 40, "main")
    assert hub_cache.snapshot("org/name", None) == str(cache / "snapshots" / ("c" * 40))
    ask_node("setup-remove", {"workdir": "~/homelab"})
    assert (cache / "refs/main").read_text() == OLD and [path.name for path in (cache / "snapshots").iterdir()] == [OLD]


def test_a_main_that_somebody_has_written_since_stays(cache: Path) -> None:
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text(OLD)
    sent(NEW, "main")
    (cache / "refs/main").write_text("d" * 40)
    ask_node("setup-remove", {"workdir": "~/homelab"})
    assert (cache / "refs/main").read_text() == "d" * 40 and not record.read()["refs"]


@pytest.mark.parametrize("revision", ["../main", "/etc/passwd", "a/../../b"])
def test_a_revision_that_climbs(cache: Path, revision: str) -> None:
    with pytest.raises(ValueError, match="not a revision"):
        ask_node("model-name", {"model": "org/name", "commit": NEW, "revision": revision})
