"""The table of what is not the same on all nodes: rows that differ, and only those."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from homelab.controller.checks import registry
from homelab.controller.checks.evidence import Evidence
from homelab.controller.checks.machine import version_drift
from tests.controller.checks import healthy
from tests.controller.checks.healthy import cpu, gpu, packages, recipe, with_facts, with_node

pytestmark = pytest.mark.timeout(20)


@pytest.mark.parametrize("evidence", [cpu(), gpu(), cpu(recipe()), gpu(recipe()), cpu(names=("tower",))])
def test_nodes_that_are_alike_have_no_rows(evidence: Evidence) -> None:
    assert version_drift.table(evidence) == []


def test_each_thing_that_differs_is_a_row_with_the_value_of_every_node_that_knows_it() -> None:
    evidence = packages(gpu(recipe()), "laptop", peft="0.17.0", torch="2.12.1+cu126", unsloth="2026.1")
    evidence = with_facts(
        evidence, "laptop", python={"version": "3.12.1", "torch_cuda": "12.6", "nccl": "2.26.2", "code_hash": "f" * 16},
        gpu={"driver_version": "550.54", "driver_cuda": "12.4"},
        data={"train": {"path": "/data/train.jsonl", "found": True, "size_bytes": 5_000_000, "sha256": "cd" * 32}},
        model={"found": True, "size_bytes": 7},
    )  # fmt: skip
    rows = dict(version_drift.table(evidence))
    assert list(rows) == [
        "python",
        "torch",
        "peft",
        "unsloth",
        "torch's CUDA",
        "NCCL",
        "NVIDIA driver",
        "driver's CUDA",
        "homelab's code",
        "model",
        "data, train",
    ]
    assert rows["peft"] == {"tower": "0.19.0", "laptop": "0.17.0", "oldtower": "0.19.0"}
    assert rows["unsloth"] == {"tower": "not there", "laptop": "2026.1", "oldtower": "not there"}
    assert rows["data, train"]["laptop"] == "cd" * 6 and rows["model"]["laptop"] == "7 bytes"


def test_a_patch_of_python_is_no_difference_and_a_node_that_does_not_know_has_no_cell() -> None:
    evidence = with_facts(with_facts(gpu(), "laptop", python={"version": "3.11.2", "nccl": None}), "tower", python={"nccl": "2.28.9"})
    assert version_drift.table(evidence) == [("NCCL", {"tower": "2.28.9", "oldtower": "2.29.7"})]


def test_another_pythons_packages_are_not_compared() -> None:
    evidence = with_facts(
        cpu(), "laptop", python={"is_another": True, "executable": "/usr/bin/python3", "version": "3.9.2", "packages": {"torch": "1.0"}}
    )
    assert version_drift.table(evidence) == []


def test_the_packages_behind_a_wrapper_are_compared() -> None:
    shim = {"executable": "/home/me/.pyenv/versions/3.11.9/bin/python3", "packages": {"torch": "1.0"}}
    evidence = with_facts(with_node(cpu(), "laptop", python="~/.pyenv/shims/python3"), "laptop", python=shim)
    assert ("torch", "1.0") in [(what, cells["laptop"]) for what, cells in version_drift.table(evidence)]


def test_a_file_that_one_node_lacks_is_a_difference() -> None:
    evidence = with_facts(cpu(recipe()), "laptop", data={"train": {"path": "/data/train.jsonl", "found": False}}, model={"found": False})
    assert {what: cells["laptop"] for what, cells in version_drift.table(evidence)} == {"model": "not there", "data, train": "not there"}


def test_a_node_that_did_not_answer_has_no_cells() -> None:
    evidence = packages(cpu(), "laptop", peft="0.17.0")
    evidence = replace(evidence, facts={name: facts for name, facts in evidence.facts.items() if name != "laptop"})
    assert version_drift.table(evidence) == []


def test_what_follows_from_another_torch_is_not_said_twice() -> None:
    """Its NCCL and its CUDA differ because torch does."""
    evidence = with_facts(packages(gpu(), "laptop", torch="2.12.1+cu126"), "laptop", python={"nccl": "2.26.2", "torch_cuda": "12.6"})
    (found,) = healthy.bad([finding for finding in registry.judge_all(evidence) if finding.subject == "python"])
    assert (found.check, found.node) == ("python.same", "laptop")


def test_nodes_with_and_without_gpus_need_different_builds() -> None:
    evidence = healthy.with_node(packages(gpu(), "laptop", torch="2.13.0+cpu"), "laptop", gpus=())
    evidence = with_facts(evidence, "laptop", python={"torch_cuda": None, "nccl": None})
    assert not [finding for finding in healthy.bad(registry.judge_all(evidence)) if finding.subject == "python"]


def model(**files: dict[str, Any]) -> dict[str, Any]:
    """A model of the same size whatever its files are, as retrained weights have it."""
    return {
        "found": True,
        "size_bytes": 269_500_000,
        "files": {**healthy.MODEL_FILES, **{name.replace("_", "."): file for name, file in files.items()}},
    }


def test_models_are_compared_by_digest_and_not_by_size() -> None:
    other = model(model_safetensors={"size_bytes": 266_000_000, "sampled": "33" * 32, "sha256": None})
    alike = [with_facts(cpu(recipe()), "laptop", model=model())]
    # A full digest that only one node has kept so far says nothing about the others.
    alike.append(
        with_facts(
            cpu(recipe()), "laptop", model=model(model_safetensors={**healthy.MODEL_FILES["model.safetensors"], "sha256": "44" * 32})
        )
    )
    for evidence in alike:
        for name in ("tower", "oldtower"):
            evidence = with_facts(evidence, name, model=model())
        assert version_drift.table(evidence) == []
        ((what, cells),) = version_drift.table(with_facts(evidence, "laptop", model=other))
        assert what == "model" and cells["tower"] == cells["oldtower"] != cells["laptop"]
        assert all(len(cell) == 12 for cell in cells.values())


@pytest.mark.parametrize(("name", "is_other"), [("/m", True), ("org/name", False)])
def test_a_file_more_is_another_folder_and_the_same_hub_model(name: str, is_other: bool) -> None:
    evidence = cpu(recipe(model={"name": name}))
    for node in healthy.NAMES:
        evidence = with_facts(
            evidence, node, model=model(**({"chat_jinja": {"size_bytes": 3, "sha256": "55" * 32}} if node == "laptop" else {}))
        )
    assert bool(version_drift.table(evidence)) is is_other
