"""The base model is built on one node before a launch, and what it says is judged; the second look is answered from what was kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.checks import registry
from homelab.controller.features.preflight import model_build
from homelab.node import model_build as on_node
from homelab.shared.protocol.errors import Refusal
from tests.controller.checks import healthy
from tests.fakes import FakeFleet

ENCODER = {
    "topic": "kind",
    "level": "fail",
    "message": "BertForMaskedLM is an encoder",
    "where": "[model] name in the recipe",
    "hint": "edit the recipe: [model] name = another",
}


def asked_of(tmp_path: Path, answer: Any, recipe: Any = None) -> tuple[FakeFleet, Any]:
    fleet = FakeFleet(tmp_path).answer("build-model", answer)
    return fleet, model_build.look(fleet, healthy.cpu(recipe or healthy.recipe()), recipe or healthy.recipe())


def test_one_node_is_asked_and_what_it_found_fails_the_preflight(tmp_path: Path) -> None:
    fleet, found = asked_of(tmp_path, {"built": {"findings": [ENCODER]}})
    assert len(fleet.verbs("build-model")) == 1

    evidence = replace(healthy.cpu(healthy.recipe()), build=found)
    (finding,) = [finding for finding in registry.judge_all(evidence) if finding.check == "model.kind"]
    assert (finding.node, finding.level) == (found.node, "fail") and "is an encoder" in finding.message and "[model] name" in finding.hint


@pytest.mark.parametrize(
    "answer",
    [
        Refusal("the model was not built without its weights within 120 s"),
        {"built": {"trained": -1}},
        {"built": {"findings": [{**ENCODER, "topic": "$(reboot)"}]}},
        {"built": {"findings": [{**ENCODER, "message": "x" * 3000}]}},
        {"built": {"findings": [ENCODER] * 51}},
        {"built": None},
        {},
    ],
    ids=str,
)
def test_what_a_node_cannot_say_is_a_warning_and_never_a_crash(tmp_path: Path, answer: Any) -> None:
    def says(request: dict[str, Any]) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    _, found = asked_of(tmp_path, says)
    assert found.refused and not found.findings

    evidence = replace(healthy.cpu(healthy.recipe()), build=found)
    assert [(finding.check, finding.level) for finding in healthy.bad(registry.judge_all(evidence))] == [("model.kind", "warn")]


def test_what_a_node_says_is_cleaned_before_a_terminal_gets_it(tmp_path: Path) -> None:
    _, found = asked_of(
        tmp_path,
        {
            "built": {
                "findings": [{**ENCODER, "message": "an \x1b]52;c;aGk=\x07encoder", "hint": "a\x1b[2J b"}],
                "beyond": {"7": "\x1b[31m<tool>"},
            }
        },
    )
    assert found.findings[0].message == "an encoder" and found.findings[0].hint == "a b" and found.beyond == {"7": "<tool>"}


def test_a_script_and_nodes_without_the_packages_are_not_asked(tmp_path: Path) -> None:
    fleet = FakeFleet(tmp_path)
    assert model_build.look(fleet, healthy.cpu(healthy.script()), healthy.script()) is None
    bare = healthy.cpu(healthy.recipe())
    for name in healthy.NAMES:
        bare = healthy.packages(bare, name, torch=None)
    assert model_build.look(fleet, bare, healthy.recipe()) is None
    assert fleet.asked == []


ABSENT = {"found": False, "config": None, "files": {}, "path": None, "problem": "not in the hub cache"}


def absent(name: str, hub: str | None) -> tuple[Any, Any]:
    """A recipe of a hub model, and nodes of which none has it."""
    recipe = healthy.recipe(model={"name": name})
    evidence = healthy.cpu(recipe)
    facts = {node: healthy.changed(of, model={**ABSENT, "hub": hub, "has_token": False}) for node, of in evidence.facts.items()}
    return recipe, replace(evidence, facts=facts)


def test_a_model_that_no_node_has_is_looked_up_on_the_hub_and_planned_by_its_config(tmp_path: Path) -> None:
    recipe, evidence = absent("org/model", "ok")
    asked: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        return {"built": {"trained": 5, "config": healthy.LLAMA, "has_chat_template": False}}

    fleet = FakeFleet(tmp_path).answer("build-model", answer)
    evidence = model_build.known_config(replace(evidence, build=model_build.look(fleet, evidence, recipe)))

    (request,) = asked
    assert request["fetch"] and request["model"] == "org/model" and "Qwen/Qwen3-8B" in request["known"]
    assert [of.model.config for of in evidence.facts.values() if of.model.config] == [healthy.LLAMA]  # type: ignore[union-attr]
    assert all(not of.model.found for of in evidence.facts.values())  # type: ignore[union-attr]


def test_a_name_that_the_hub_does_not_know_fails_once_and_nobody_says_that_a_launch_downloads_it(tmp_path: Path) -> None:
    recipe, evidence = absent("meta-llama/Lama-3", "ok")
    slip = {
        "topic": "hub",
        "level": "fail",
        "message": "the hub knows no model meta-llama/Lama-3",
        "hint": "edit the recipe: [model] name = org/name",
    }
    fleet = FakeFleet(tmp_path).answer("build-model", {"built": {"findings": [slip]}})

    evidence = replace(evidence, build=model_build.look(fleet, evidence, recipe))

    assert [finding.check for finding in healthy.bad(registry.judge_all(evidence)) if finding.check.startswith("model.")] == ["model.name"]


@pytest.mark.parametrize("hub", ["offline", "huggingface.co:443: no answer within 2 s"])
def test_who_has_no_way_to_the_hub_is_not_sent_there(hub: str, tmp_path: Path) -> None:
    recipe, evidence = absent("org/model", hub)
    assert model_build.look(FakeFleet(tmp_path), evidence, recipe) is None


def test_the_key_names_all_that_the_answer_depends_on() -> None:
    facts = healthy.cpu(healthy.recipe()).facts["tower"]
    kinds = [{"kind": "lora"}, {"kind": "qlora"}, {"kind": "lora", "rank": 4}, {"kind": "lora", "targets": ["q_proj"]}, {"kind": "full"}]
    keys = {model_build.question(facts, healthy.recipe(method=method))["key"] for method in kinds}
    other = healthy.changed(facts, model={**facts.model.model_dump(), "config": {**healthy.LLAMA, "vocab_size": 7}})  # type: ignore[union-attr]
    assert len(keys | {model_build.question(other, healthy.recipe())["key"]}) == len(kinds) + 1


def test_a_node_keeps_what_it_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        built.append(question["model"])
        return {"trained": len(built)}

    monkeypatch.setattr(on_node, "_ask", ask)
    request = {"workdir": str(tmp_path), "key": "ab" * 32, "model": "m"}
    assert [on_node.build(request), on_node.build(request), on_node.build({**request, "key": "cd" * 32})] == [
        {"built": {"trained": count}} for count in (1, 1, 2)
    ]
    with pytest.raises(ValueError, match="usable key"):
        on_node.build({**request, "key": "../x"})


@pytest.mark.slow
def test_the_program_itself_answers_on_a_node(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.worker import harness

    folder = harness.tiny_llama(tmp_path / "model")
    method = {"kind": "lora", "base": "auto", "rank": 2, "alpha": 4, "dropout": 0.0, "targets": "all-linear", "backend": "auto"}
    asked = {
        "model": str(folder),
        "revision": None,
        "method": method,
        "train": {"seed": 1, "gradient_checkpointing": False},
        "precision": "bf16",
    }
    built = on_node.build({"workdir": str(tmp_path), "key": "ab" * 32, **asked})["built"]
    assert built["findings"] == [] and built["trained"] > 0 and built["embedding_rows"] == 259 and built["positions"] is None
