"""What this machine knows of a model without a network is planned with: config.json of a folder, and of the hub's cache at the revision that is meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from homelab.cli import main
from homelab.controller.attempt import base_model
from homelab.controller.base.errors import EXIT_INPUT
from tests import builders

NAME = "org/mine"
OLD, NEW = "a" * 40, "b" * 40
CLUSTER = """[cluster]
network = "10.0.0.0/24"
[[nodes]]
name = "tower"
host = "10.0.0.1"
lan_address = "10.0.0.1"
gpus = [{ model = "RTX 3090", vram_gb = 24 }]
"""
RECIPE = """[model]
name = "NAME"
[data]
train = "~/chats.jsonl"
[method]
kind = "lora"
[train]
global_batch = 8
steps = 2
learning_rate = 1e-4
seq_len = 64
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with two commits of a model: main is the newer one, with one more layer."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    place = tmp_path / "hf" / "hub" / "models--org--mine"
    for commit, layers in ((OLD, 2), (NEW, 3)):
        (place / "snapshots" / commit).mkdir(parents=True)
        (place / "snapshots" / commit / "config.json").write_text(json.dumps({**builders.LLAMA, "num_hidden_layers": layers}))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(NEW)
    (place / "refs" / "v1").write_text(OLD)
    return place


def look(name: str, **model: Any) -> base_model.LocalModel:
    return base_model.look(builders.recipe(model={"name": name, **model}))


@pytest.mark.parametrize(("revision", "layers"), [(None, 3), ("main", 3), ("v1", 2), (OLD, 2), ("v9", None), ("../../x", None)])
def test_the_cache_of_the_hub_is_read_at_the_revision_that_is_meant(cache: Path, revision: str | None, layers: int | None) -> None:
    config = look(NAME, revision=revision).config
    assert (config or {}).get("num_hidden_layers") == layers
    assert look("org/other").config is None


@pytest.mark.parametrize("named", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HOME"])
def test_the_cache_is_where_the_hubs_own_library_has_it(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str) -> None:
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    below = {"XDG_CACHE_HOME": "huggingface/hub", "HOME": ".cache/huggingface/hub"}.get(named, "")
    folder = tmp_path / "elsewhere"
    (folder / below).parent.mkdir(parents=True, exist_ok=True)
    cache.parent.rename(folder / below)
    monkeypatch.setenv(named, str(folder))
    assert look(NAME).config is not None


def planned(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any], str]:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "r.toml").write_text(RECIPE.replace("NAME", name))
    code = main.run(["plan", str(tmp_path / "r.toml"), "--offline", "--json", "--cluster", str(tmp_path / "cluster.toml"), *options])
    found = json.loads(capsys.readouterr().out)
    return code, found, "\n".join(map(str, (found.get("error") or {}).values()))


@pytest.mark.parametrize("kind", ["folder", "cache"])
def test_an_offline_plan_reads_it(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    code, found, _ = planned(str(cache / "snapshots" / NEW) if kind == "folder" else NAME, tmp_path, capsys)
    assert code == 0 and found["ranks"][0]["memory"]["items"] and found["time"] is not None


BROKEN = {
    "nothing": (b"", "is not valid JSON"), "a list": (b"[]", "is not a JSON object"), "deep": (b'{"a":' * 100_000, "nested too deep"),
    "long number": (b'{"hidden_size": ' + b"1" * 5000 + b"}", "is not valid JSON"), "huge": (b" " * (17 << 20), "has 17825792 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_config_that_cannot_be_read_is_refused_in_three_parts(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    content, words = BROKEN[case]
    place = cache / "snapshots" / NEW / "config.json"
    place.write_bytes(content)
    code, _, err = planned(NAME, tmp_path, capsys)
    assert code == EXIT_INPUT and words in err and str(place) in err and "copy the model's folder again" in err


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["tiny.gguf"], "holds GGUF files"),
        (["adapter_config.json"], "holds adapters"),
        (["model_index.json"], "diffusers"),
        (["a.txt"], "it has no config.json"),
    ],
)
def test_what_lies_in_the_place_of_a_model_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], words: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    code, _, err = planned(str(folder), tmp_path, capsys)
    assert code == EXIT_INPUT and words in err and str(folder) in err


@pytest.mark.parametrize("name", ["/a\0b", "org/a\0b", "/" + "x" * 5000, "x" * 5000, "org/..", "/dev/null", "/proc/self/mem"])
def test_a_name_that_no_file_can_have_is_a_model_that_is_not_here(name: str) -> None:
    assert look(name) == base_model.LocalModel()
    assert all(isinstance(other, str) for other in base_model.beside(builders.recipe(model={"name": name})))
