"""What the controller reads of a message is what the node declares."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from homelab.controller.facts import node as facts
from homelab.controller.remote import answers
from homelab.node.facts import PROBES
from homelab.shared.protocol import machine_messages
from homelab.shared.protocol.message import Message

READ_AS: list[tuple[type[BaseModel], Any]] = [
    (facts.Facts, machine_messages.Facts), ]  # fmt: skip


@pytest.mark.parametrize(("model", "message"), READ_AS, ids=lambda value: value.__name__)
def test_every_field_that_is_read_is_declared(model: type[BaseModel], message: Any) -> None:
    assert set(model.model_fields) <= set(message.__annotations__)


def test_every_answer_of_the_node_program_is_declared() -> None:
    assert [verb for verb, model in answers.SHAPES.items() if not issubclass(model, Message)] == ["facts"]


def test_the_facts_have_one_key_for_each_probe() -> None:
    assert set(machine_messages.Facts.__annotations__) == {"node", "broken", *PROBES}
