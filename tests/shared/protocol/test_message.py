"""A message is a frozen value with declared fields; what the node builds is what the controller reads."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

import homelab.controller
from homelab.controller.base.models import WireModel
from homelab.controller.facts.reading import read
from homelab.shared import markers
from homelab.shared.protocol import marks
from homelab.shared.protocol.message import Message, as_json, defaults, fields
from homelab.shared.protocol.run_messages import Exit, Reply, RunReply
from homelab.shared.protocol.verb_table import VERBS
from tests.shared.protocol.test_fields import kinds_in

HOMELAB = Path(__file__).resolve().parents[3] / "homelab"


class Sample(Message):
    needed: int
    table: dict[str, int] = {}
    text: Annotated[str, markers.Longest(5), marks.PLAIN] = ""


class Longer(Sample):
    needed: int = 3


def test_a_field_that_is_missing_or_unknown_is_a_mistake() -> None:
    assert Longer().needed == 3 and Longer(needed=4).replace(text="a") == Longer(needed=4, text="a") != Sample(needed=4, text="a")
    with pytest.raises(TypeError, match="needed"):
        Sample()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="other"):
        Sample(needed=1, other=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="is not a message"):
        json.dumps({"x": {1, 2}}, default=fields)


def test_it_is_frozen_and_has_its_own_tables() -> None:
    one, other = Sample(needed=1), read(Sample, {"needed": 1})
    for change in (lambda: setattr(one, "needed", 2), lambda: delattr(one, "needed")):
        with pytest.raises(AttributeError, match="frozen"):
            change()
    assert one == other and one.table is not other.table and read(Sample, {"needed": 1}).table is not other.table


def test_it_is_read_as_it_was_written() -> None:
    built = Reply(node="a", time=1.0, run=RunReply(name="r", exit=Exit(returncode=0), ranks={}, torchrun_tail=("x",)))
    assert read(Reply, json.loads(json.dumps(built, default=fields))) == read(Reply, as_json(built)) == built


@pytest.mark.parametrize(
    "said", [{}, {"needed": "x"}, {"needed": 1, "text": "longer"}, {"needed": 1, "table": {"a": []}}, [], {"needed": None}]
)
def test_a_changed_type_is_seen(said: Any) -> None:
    with pytest.raises(ValidationError):
        read(Sample, said)
    assert read(Sample, {"needed": 1, "text": "a\x1b[1m", "of tomorrow": 2}) == Sample(needed=1, text="a")


class Unbounded(Message):
    number: Annotated[int, markers.Longest(3)]


def test_a_limit_that_a_type_cannot_have_is_refused() -> None:
    with pytest.raises(TypeError, match="no limit of a int"):
        read(Unbounded, {"number": 1})


def test_every_model_of_the_controller_can_be_built() -> None:
    """They are built when they are used first: a message in one that is not marked with `AsMessage` would be an error only then."""

    class Unmarked(WireModel):
        exit: Exit

    for module in pkgutil.walk_packages(homelab.controller.__path__, "homelab.controller."):
        importlib.import_module(module.name)
    models = list(_below(BaseModel))
    assert len(models) > 100 and [model for model in models if not _can_be_built(model)] == [Unmarked]


def _below(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for below in kind.__subclasses__():
        if below.__module__.startswith(("homelab.", __name__)):
            yield below
        yield from _below(below)


def _can_be_built(model: type[BaseModel]) -> bool:
    try:
        model.model_rebuild()
    except PydanticSchemaGenerationError:
        return False
    return True


# Of a refusal and of what a short job says, which are no messages; `cache` is of the controller's own program (hub_data).
NO_FIELDS = {"error", "message", "cache", "Content-Length"}


def _taken(tree: ast.Module, names: tuple[str, ...]) -> Iterator[str]:
    """Keys that are taken from answers as they came: `answer["left"]`, `answers[node].get("run")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            key, of = node.slice.value, node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
            key, of = getattr(node.args[0], "value", None), node.func.value
        else:
            continue
        while isinstance(of, ast.Subscript | ast.Attribute | ast.Call):
            of = of.func if isinstance(of, ast.Call) else of.value
        if isinstance(of, ast.Name) and of.id in names and isinstance(key, str):
            yield key


def test_every_key_that_is_taken_from_an_answer_is_declared() -> None:
    """Types do not see a key: a field that leaves a message, because nobody seems to read it, would be missing without a word."""
    declared = {name for verb in VERBS.values() for kind in kinds_in(verb.answer_type()) for name in defaults(kind)}
    found = set()
    for file in (HOMELAB / "controller").rglob("*.py"):
        names = (
            ("answer", "answers", "stopped", "reply", "run")
            if file.name == "node_matching.py"
            else ("answer", "answers", "stopped", "reply")
        )
        found |= set(_taken(ast.parse(file.read_text(encoding="utf-8")), names))
    assert {"as_node", "left", "as_nodes"} <= found and found - declared - NO_FIELDS == set()
    assert set(_taken(ast.parse('answers[name].get("nobody_declares_this")'), ("answers",))) - declared == {"nobody_declares_this"}
