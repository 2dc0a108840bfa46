"""Where everything of a run lies."""

from __future__ import annotations

import pytest

from homelab.shared.protocol import layout

SHA, GROUP = "a" * 64, "b" * 64


@pytest.mark.parametrize("name", ["2026-11-21-1405-llama7b-lora", "küche", "a.b_c-2"])
def test_a_name_of_one_component_is_usable(name: str) -> None:
    assert layout.checked(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "-x", ".hidden", "a\n", "a b", None, 5])
def test_a_name_that_climbs_is_not_usable(name: object) -> None:
    with pytest.raises(ValueError, match="not a usable name"):
        layout.checked(name)


def test_paths_are_relative_to_a_folder_of_the_reader() -> None:
    assert layout.run("r") == "runs/r"
    assert layout.plan_json(3) == "attempts/3/plan.json"
    assert layout.node(3, "tower") == "attempts/3/nodes/tower"
    assert layout.rank(3, 0) == "attempts/3/ranks/0"


def test_a_shipped_file_lies_in_a_folder_named_by_its_content() -> None:
    assert layout.data_file({"sha256": SHA, "name": "x/rows.jsonl"}) == f"data/{SHA[:16]}/rows.jsonl"


def test_files_that_belong_together_share_a_folder() -> None:
    assert layout.data_file({"sha256": SHA, "name": "y", "folder": GROUP, "inside": "lib/y.py"}) == f"data/{GROUP[:16]}/lib/y.py"


@pytest.mark.parametrize(
    "entry", [{"sha256": "../../x"}, {"folder": GROUP[:16]}, {"folder": GROUP, "inside": "../y"}, {"folder": GROUP, "inside": "/y"}]
)
def test_an_entry_that_leads_elsewhere_is_refused(entry: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="not a "):
        layout.data_file({"sha256": SHA, "name": "y", **entry})


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct-lora.json"),
        ("~/models/my model!/", "my-model--lora.json"),
        ("/", "model-lora.json"),
    ],
)
def test_the_name_of_the_file_of_speeds(model: str, name: str) -> None:
    assert layout.speeds_name(model, "lora") == name
    assert layout.speeds_name(model, "lora", "8bit") == name.replace("lora", "lora-8bit")
