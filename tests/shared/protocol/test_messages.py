"""Every request and every answer of the node program has its type, which node and controller share."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from homelab.controller.facts.node import Facts
from homelab.node.facts import PROBES
from homelab.shared.protocol.message import Message
from homelab.shared.protocol.request import Request
from homelab.shared.protocol.verb_table import VERBS

HOMELAB = Path(__file__).resolve().parents[3] / "homelab"
# `facts` has its type in the controller (`homelab.controller.facts.node`). The others: bytes; the last two speak line by line, and each line is read
# where it is heard.
WITHOUT_AN_ANSWER = {"facts", "result-part", "send-checkpoint", "converse", "result-make"}
# What goes on as it is, to a program of the worker or to the probes.
WITHOUT_A_REQUEST = {"facts", "build-model", "chat", "converse", "dry-run", "result-make", "sample-data"}


def test_every_answer_is_a_message() -> None:
    kinds = {name: verb.answer_type() for name, verb in VERBS.items()}
    assert {name for name, kind in kinds.items() if kind is None} == WITHOUT_AN_ANSWER
    assert all(issubclass(kind, Message) for kind in kinds.values() if kind is not None)


def test_every_request_is_a_message() -> None:
    kinds = {name: verb.request_type() for name, verb in VERBS.items()}
    assert {name for name, kind in kinds.items() if kind is None} == WITHOUT_A_REQUEST
    assert all(issubclass(kind, Request) for kind in kinds.values() if kind is not None)


def _asked(file: Path) -> Iterator[tuple[str, ast.expr]]:
    """(verb, request) of every question of a file whose verb is written there."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Attribute(attr="ask" | "send" | "fetch" | "open"), args=[ast.Constant(value=verb), request, *_]) if (
                verb in VERBS
            ):
                yield str(verb), request


def test_no_question_with_a_request_of_its_own_is_asked_with_a_dictionary() -> None:
    found = [question for file in (HOMELAB / "controller").rglob("*.py") for question in _asked(file)]
    assert len(found) > 30
    assert {verb for verb, request in found if isinstance(request, ast.Dict)} <= WITHOUT_A_REQUEST


def test_the_facts_have_one_key_for_each_probe() -> None:
    assert set(Facts.model_fields) == {"node", "broken", *PROBES}
