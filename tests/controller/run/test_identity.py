"""Is it still the same training? Edited recipes, exchanged models: found, and the difference named."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from homelab.controller.config.recipe import Recipe, parse_recipe
from homelab.controller.facts.training import ModelFacts
from homelab.controller.run import fingerprint

pytestmark = pytest.mark.timeout(10)

RECIPE = parse_recipe(
    {
        "model": {"name": "/models/tiny"}, "data": {"train": "chats.jsonl"}, "method": {"kind": "lora", "targets": ["q_proj", "v_proj"]},
        "train": {"global_batch": 8, "epochs": 1, "learning_rate": 2e-4},
    },
    strict=False,
)  # fmt: skip


def described(**changes: Any) -> dict[str, Any]:
    """run.json as a launch writes it; `changes` are keys of the recipe, as section__key=value, made afterwards."""
    entry = {"path": "chats.jsonl", "name": "chats.jsonl", "sha256": "a" * 64, "kind": "file"}
    digests = ("train:" + "a" * 64,)
    found: dict[str, Any] = {
        "recipe": RECIPE.model_dump(mode="json"),
        "data": {"train": entry, "eval": None},
        "recipe_hash": RECIPE.law_hash(digests),
    }
    for name, value in changes.items():
        section, key = name.split("__")
        found["recipe"][section][key] = value
    return copy.deepcopy(found)


def test_the_name_of_a_training_is_that_of_every_version() -> None:
    """Runs that go on have it in their run.json and in their checkpoints: computed by the tree before version 0.2.0."""
    assert RECIPE.law_hash(("train:" + "a" * 64,)) == "cd3ef73c0d98ef44"


def test_fingerprint_is_that_of_the_launch() -> None:
    assert fingerprint.fingerprint(described()) == described()["recipe_hash"]


@pytest.mark.parametrize(
    "changes", [{"checkpoint__every_steps": 7}, {"recovery__min_nodes": 2}, {"parallel__port": 30000}, {"method__backend": "transformers"}]
)
def test_what_may_change_on_recovery_changes_nothing(changes: dict[str, Any]) -> None:
    assert fingerprint.fingerprint(described(**changes)) == described()["recipe_hash"]
    assert fingerprint.law_differences(described(), described(**changes)) == []


def test_how_often_is_evaluated_is_part_of_a_training_that_chooses_by_it() -> None:
    plain, chosen = described(), described(train__keep_best=True)
    assert fingerprint.fingerprint(described(tracking__eval_every_steps=5)) == fingerprint.fingerprint(plain)
    other = described(train__keep_best=True, tracking__eval_every_steps=5)
    assert len({fingerprint.fingerprint(entry) for entry in (plain, chosen, other)}) == 3
    assert fingerprint.law_differences(chosen, other) == ["eval_every_steps: 0 -> 5"]
    content = RECIPE.model_dump() | {"data": {"train": "a", "eval": "b"}, "tracking": {"eval_every_steps": 5}}
    recipe = parse_recipe(content | {"train": {**content["train"], "early_stopping": 2}}, strict=False)
    entry = {"recipe": recipe.model_dump(mode="json"), "data": {}}
    assert fingerprint.fingerprint(entry) == recipe.law_hash(())


def test_a_key_that_a_newer_version_knows_is_no_edit() -> None:
    """It is not in the run.json of an older one, and the default that a newer one would fill in is not part of that training's name."""
    old = described()
    del old["recipe"]["train"]["fused_loss"]
    old["recipe_hash"] = fingerprint.fingerprint(old)
    assert old["recipe_hash"] != described()["recipe_hash"]
    assert parse_recipe(old["recipe"], strict=False).train.fused_loss == "auto"  # type: ignore[union-attr]
    assert fingerprint.fingerprint(old) == old["recipe_hash"]


def test_differences_are_named_key_by_key() -> None:
    eight_bit = described(method__base="8bit")
    assert fingerprint.law_differences(described(), eight_bit) == ['method.base: null -> "8bit"']
    edited = described(train__learning_rate=1e-3, method__targets=["q_proj"], model__name="/models/other")
    edited["data"]["train"]["sha256"] = "b" * 64
    assert fingerprint.fingerprint(edited) != described()["recipe_hash"]
    found = fingerprint.law_differences(described(), edited)
    assert found[:3] == [
        'method.targets: ["q_proj", "v_proj"] -> ["q_proj"]', 'model.name: "/models/tiny" -> "/models/other"',
        f'sha256.train: "{"a" * 36}... -> "{"b" * 36}...',
    ]  # fmt: skip
    assert found[3:] == ["train.learning_rate: 0.0002 -> 0.001"]


NO_RUN_JSON: list[dict[str, Any]] = [
    {}, {"recipe": 5, "data": {}}, {"recipe": {}, "data": []}, {"recipe": {}, "data": {"train": {"path": 5}}}, {"recipe": {"method": 5}, "data": {}},
]  # fmt: skip


@pytest.mark.parametrize("value", NO_RUN_JSON)
def test_what_is_no_run_json_has_no_fingerprint(value: dict[str, Any]) -> None:
    assert fingerprint.fingerprint(value) is None


def model(*, config: dict[str, Any] | None = None, found: bool = True, **files: Any) -> ModelFacts:
    content = {"hidden_size": 64, "transformers_version": "5.0"} | (config or {})
    entries = {
        "model_safetensors": {"size_bytes": 10**9, "sampled": "s1", "sha256": None},
        "tokenizer_json": {"size_bytes": 5, "sha256": "t" * 64},
    }
    return ModelFacts.model_validate(
        {
            "found": found,
            "path": "/models/tiny",
            "config": content,
            "files": {key: value for key, value in (entries | files).items() if value},
        }
    )


def differences(now: ModelFacts, *, is_folder: bool = True) -> list[str]:
    record = fingerprint.model_record(model())
    assert record is not None
    return fingerprint.model_differences(record, now, is_folder=is_folder)


def test_the_same_model_is_the_same() -> None:
    assert differences(model(config={"transformers_version": "5.1", "_name_or_path": "x"})) == []
    assert differences(model(model_safetensors={"size_bytes": 10**9, "sampled": "s1", "sha256": "w" * 64})) == [], (
        "its full digest is known by now"
    )
    assert differences(model(found=False)) == [], "that it is not there is another check's"


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (model(config={"hidden_size": 32}), "config.json, hidden_size: 64 -> 32"),
        (model(model_safetensors={"size_bytes": 10**9, "sampled": "s2"}), "model_safetensors: other content"),
        (model(model_safetensors={"size_bytes": 9, "sha256": "w" * 64}), "model_safetensors: 1000000000 -> 9 bytes"),
        (model(tokenizer_json={"size_bytes": 5, "sha256": "u" * 64}), f"tokenizer_json: sha256 {'t' * 12} -> {'u' * 12}"),
        (model(tokenizer_json=None), "tokenizer_json is gone"),
        (model(chat_template={"size_bytes": 5, "sha256": "u" * 64}), "chat_template was not there"),
    ],
)
def test_what_was_exchanged_is_named(now: ModelFacts, said: str) -> None:
    assert differences(now) == [said]


def test_files_of_a_hub_model_may_be_downloaded_later() -> None:
    assert differences(model(tokenizer_json=None), is_folder=False) == []


def test_a_damaged_record_refuses_nobody() -> None:
    for record in ({}, {"config": 5, "files": {}}, {"config": {"hidden_size": 64}, "files": {"tokenizer_json": 5}}):
        assert [line for line in fingerprint.model_differences(record, model(), is_folder=True) if "was not there" not in line] == []


def test_the_environment_of_a_script_is_part_of_its_training_and_that_of_the_worker_is_not() -> None:
    """A program may read any variable; of the built-in worker those that would change the training are refused."""

    def hash_of(recipe: Recipe, **environment: str) -> str:
        changed = recipe.model_copy(update={"environment": environment})
        assert changed.law_hash(()) == fingerprint.fingerprint({"recipe": changed.model_dump(mode="json"), "data": {}})
        return changed.law_hash(())

    script = parse_recipe({"script": {"path": "train.py"}})
    assert hash_of(script) == script.law_hash(()) and hash_of(script, LR="1") != hash_of(script) != hash_of(script, LR="2")
    assert hash_of(RECIPE, NCCL_DEBUG="INFO") == hash_of(RECIPE)
