"""A plan knows a model that nobody has by its config.json on the hub: the real client asks a hub on loopback for one small file. A refusal is a note."""

from __future__ import annotations

import importlib.util
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

from homelab.controller.attempt import hub_config
from homelab.controller.features.preflight import plan_inputs
from homelab.controller.planning.inputs import PlanInputs
from homelab.shared.recipe import Model
from tests import builders
from tests.worker.fake_hub import Hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # it was read when the library was imported
    served = Hub()
    monkeypatch.setenv("HF_ENDPOINT", served.endpoint)
    served.push("org/mine", {"config.json": json.dumps({**builders.LLAMA, "num_hidden_layers": 2}), "model.safetensors": b"x" * 1000})
    served.push("org/mine", {"config.json": json.dumps(builders.LLAMA), "model.safetensors": b"x" * 1000})
    served.push("org/list", {"config.json": "[]"})
    served.push("org/broken", {"config.json": "{"})
    served.push("org/deep", {"config.json": '{"a":' * 100_000})
    served.push("org/tiny", {"tiny.gguf": b"GGUF"})
    served.push("org/gated", {"config.json": "{}"})
    served.gated, served.status = {"org/gated"}, {"org/busy": 503}
    yield served
    served.close()


def inputs(name: str) -> PlanInputs:
    return PlanInputs(builders.cluster(), builders.recipe(model={"name": name}), {}, "r", 1)


def test_the_plan_of_an_unknown_model_asks_for_one_small_file(hub: Hub) -> None:
    known, notes = plan_inputs._with_hub(inputs("org/mine"), print)
    assert known.config == builders.LLAMA and notes == ()
    assert hub.asked == ["/org/mine/resolve/main/config.json"]


def test_the_revision_is_the_recipes(hub: Hub) -> None:
    found = hub_config.fetch(Model(name="org/mine", revision=next(iter(hub.commits["org/mine"]))))
    assert found.config is not None and found.config["num_hidden_layers"] == 2


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "/models/there"])
def test_what_is_known_or_a_folder_is_not_asked_for(hub: Hub, name: str) -> None:
    assert plan_inputs._with_hub(inputs(name), print) == (inputs(name), ()) and hub.asked == []


@pytest.mark.parametrize(("variable", "value"), [("HF_HUB_OFFLINE", "1"), ("HF_HUB_OFFLINE", "true"), ("TRANSFORMERS_OFFLINE", "yes")])
def test_offline_is_obeyed(hub: Hub, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    assert hub_config.fetch(Model(name="org/mine")) == hub_config.FetchedConfig() and hub.asked == []


NOTES: dict[str, tuple[str | None, str]] = {
    "org/none": (None, "knows no model of that name"), "a b/c": (None, "knows no model of that name"), "org/mine": ("v9", 'no revision "v9"'), "org/busy": (None, "503"),
    "org/gated": (None, "accepted its terms"), "org/tiny": (None, "has no such file"), "org/list": (None, "is not a JSON object"), "org/broken": (None, "Expecting property name"),
    "org/deep": (None, "recursion"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTES)
def test_a_refusal_is_a_note(hub: Hub, name: str) -> None:
    revision, words = NOTES[name]
    found = hub_config.fetch(Model(name=name, revision=revision))
    assert found.config is None and words in found.note and found.note.startswith(f"config.json of {name} was not fetched from the hub")


def test_an_endless_file_is_not_read(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_config, "_MOST_BYTES", 100)
    assert "larger than 100 bytes" in hub_config.fetch(Model(name="org/mine")).note


def test_a_hub_that_does_not_answer_costs_a_limited_time(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_config, "_LIMIT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        begin = time.monotonic()
        assert "no answer within" in hub_config.fetch(Model(name="org/mine")).note
        assert time.monotonic() - begin < 5


def test_without_the_library_it_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name.startswith("huggingface") else find(name))
    found: Any = hub_config.fetch(Model(name="org/mine"))
    assert "pip install huggingface_hub" in found.note and hub.asked == []
