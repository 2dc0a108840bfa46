"""A key of a recipe that decides the training is read by what trains, or by the plan that it is trained by."""

from __future__ import annotations

import ast
import dataclasses

import pytest

from homelab.shared.recipe.data import Data
from homelab.shared.recipe.training import Method, Model, Train
from tests import limits

READERS = ("worker/", "shared/law/", "shared/recipe/", "controller/planning/")


def read() -> set[str]:
    """Every attribute that a reader asks for, and every key of a dictionary there; a check of the recipe itself (`__post_init__`) trains nothing."""
    found = set()
    for path, tree in limits.trees().items():
        if limits.label(path).startswith(READERS):
            checks = [node for node in limits.nodes(tree) if isinstance(node, ast.FunctionDef) and node.name == "__post_init__"]
            hidden = {id(inner) for check in checks for inner in ast.walk(check)}
            for node in limits.nodes(tree):
                if isinstance(node, ast.Attribute) and id(node) not in hidden:
                    found.add(node.attr)
                elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                    found.add(str(node.slice.value))
    return found


@pytest.mark.parametrize("section", [Model, Data, Method, Train])
def test_every_key_that_decides_the_training_is_read(section: type) -> None:
    assert {field.name for field in dataclasses.fields(section)} - read() == set()


def test_a_key_that_does_nothing_is_seen() -> None:
    assert "label_smoothing" not in read()
