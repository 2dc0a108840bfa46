"""What the plan says of data from the hub, and of plain prompts where the model has a chat template."""

from __future__ import annotations

from typing import Any

from homelab.controller.facts.node import Facts
from homelab.controller.planning import choices
from homelab.controller.planning.speed.dataset_size import DataFile
from homelab.shared.recipe import HubData
from tests.controller.checks import healthy

COMMIT = "ab" * 20


def said(data: dict[str, Any], *, template: bool = True, seen: dict[str, DataFile] | None = None) -> dict[str, tuple[str, str]]:
    facts = {"tower": Facts.model_validate({"node": "tower", "model": {"found": True, "has_chat_template": template}})}
    return {choice.subject: (choice.value, choice.because) for choice in choices.data_source(healthy.recipe(data=data), facts, seen or {})}


def test_the_revision_of_the_hub_is_said() -> None:
    data = {"train": "hub:a/b", "config": "two", "eval": "hub:a/b"}
    found = said(data, template=False)
    assert set(found) == {"train data", "eval data"} and found["eval data"][0] == "hub:a/b, two, split validation"
    assert "the newest revision at the launch" in found["train data"][1]
    looked = said(data, seen={"train": DataFile(hub=HubData("a/b", "two", "train", COMMIT))})
    assert f"revision {COMMIT}, the newest at that time" in looked["train data"][1]
    assert "revision v1, the recipe says so" in said({**data, "revision": "v1"})["train data"][1]


def test_where_plain_prompts_go_is_said() -> None:
    assert said({"train": "a.jsonl"})["chat template"][0] == "used" and "TRL" in said({"train": "a.jsonl"})["chat template"][1]
    assert said({"train": "a.jsonl", "template": "none"}, template=False)["chat template"][0] == "not used"
    assert not said({"train": "a.jsonl"}, template=False) and not said({"train": "a.jsonl", "format": "chat"})
