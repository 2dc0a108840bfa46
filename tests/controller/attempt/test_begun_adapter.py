"""[model] adapter: where it is found, and which edit another adapter gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.attempt import inputs
from homelab.controller.base.errors import InputError
from homelab.controller.config.load import load_recipe
from homelab.controller.run import run_record

RECIPE = """[model]
name = "org/small"
adapter = "{}"
[data]
train = "rows.jsonl"
[method]
kind = "lora"
[train]
global_batch = 2
epochs = 1
learning_rate = 1e-4
seq_len = 64
"""
SETTINGS: dict[str, Any] = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "base_model_name_or_path": "/models/small", "use_dora": False}


def written(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | changes))
    return folder


def items(tmp_path: Path, named: str) -> dict[str, inputs.RecipeInput]:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "r.toml").write_text(RECIPE.format(named))
    return {item.role: item for item in inputs.of_recipe(load_recipe(tmp_path / "r.toml"), tmp_path / "r.toml")}


@pytest.mark.parametrize("named", ["2026-run", "models/2026-run", "./models/2026-run/"])
def test_a_fetched_run_is_shipped_by_its_content(tmp_path: Path, named: str) -> None:
    written(tmp_path / "models" / "2026-run")
    item = items(tmp_path, named)["adapter"]
    assert item.kind == "shipped" and item.name == "adapter_model.safetensors" and item.sha256 and item.size_bytes == 7
    assert item.node_path("/w").startswith("/w/data/")


def test_an_adapter_of_an_earlier_version_that_names_a_kept_base_is_taken(tmp_path: Path) -> None:
    written(tmp_path / "models" / "run", base_model_name_or_path="/home/me/homelab/bases/small-nf4-0123456789abcdef-bfloat16")
    assert items(tmp_path, "run")["adapter"].kind == "shipped"


def test_models_of_a_folder_above_are_found_wherever_the_command_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue has another working folder than the person who has filled it."""
    written(tmp_path / "models" / "2026-run")
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir("/")
    assert items(tmp_path / "recipes", "2026-run")["adapter"].local == tmp_path / "models" / "2026-run" / "adapter_model.safetensors"


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"r": 8}, "rank 8, and the recipe has 16", "[method] rank = 8"),
        ({"lora_alpha": 16}, "alpha 16, and the recipe has 32", "[method] alpha = 16"),
        ({"base_model_name_or_path": "org/large"}, "trained on large, and the recipe's model is small", '[model] name = "org/large"'),
        (
            {"base_model_name_or_path": "/w/bases/large-nf4-0123456789abcdef-float32"},
            "trained on large, and the recipe's model is small",
            "name = the model of that name",
        ),
        ({"peft_type": "IA3"}, "(IA3)", "plain LoRA"),
        ({"use_dora": True}, "(use_dora)", "merge it into its base"),
        ({"modules_to_save": ["score"]}, "(modules_to_save)", "plain LoRA"),
    ],
)
def test_another_adapter_gets_the_edit(tmp_path: Path, changes: dict[str, Any], message: str, hint: str) -> None:
    written(tmp_path / "models" / "run", **changes)
    with pytest.raises(InputError) as error:
        items(tmp_path, "run")
    assert message in error.value.message and hint in str(error.value.hint) and "key model.adapter: run" in error.value.where


def test_a_name_without_a_folder_is_fetched_first(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        items(tmp_path, "2026-run")
    assert f"homelab fetch 2026-run {tmp_path}/models/2026-run" in str(error.value.hint), "the folder in which it is looked for"
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError) as error:
        items(tmp_path, "empty")
    assert "has no adapter_model.safetensors" in error.value.message
    (written(tmp_path / "broken") / "adapter_config.json").write_text("{")
    with pytest.raises(InputError) as error:
        items(tmp_path, "broken")
    assert "cannot be read" in error.value.message


def test_a_run_that_begins_with_an_adapter_is_whole(tmp_path: Path) -> None:
    written(tmp_path / "models" / "run")
    found = items(tmp_path, "run")
    described = {
        role: {"kind": "file", "sent": item.kind, "path": item.path, "name": item.name, "sha256": item.sha256}
        for role, item in found.items()
    }
    run_json = {"recipe": load_recipe(tmp_path / "r.toml").model_dump(mode="json"), "data": described}
    assert run_record.fault(run_json) is None
    assert (
        run_record.fault(run_json | {"data": {"train": described["train"]}})
        == "data.adapter: the adapter that the run begins with is not named"
    )
