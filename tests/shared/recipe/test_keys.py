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
    """Every attribute that a reader asks for, and every key of a dictionary there."""
    found = set()
    for path, tree in limits.trees().items():
        if limits.label(path).startswith(READERS):
            found |= {node.attr for node in limits.nodes(tree) if isinstance(node, ast.Attribute)}
            found |= {
                node.slice.value for node in limits.nodes(tree) if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
            }
    return found


@pytest.mark.parametrize("section", [Model, Data, Method, Train])
def test_every_key_that_decides_the_training_is_read(section: type) -> None:
    assert {field.name for field in dataclasses.fields(section)} - read() == set()


def test_a_key_that_does_nothing_is_seen() -> None:
    assert "label_smoothing" not in read()
