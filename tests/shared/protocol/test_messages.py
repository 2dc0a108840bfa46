"""Every answer of the node program has its type, which node and controller share."""

from __future__ import annotations

from homelab.controller.facts.node import Facts
from homelab.node.facts import PROBES
from homelab.shared.protocol.message import Message
from homelab.shared.protocol.verb_table import VERBS

# `facts` has its type in the controller (`homelab.controller.facts.node`). The others: a word or two that nobody relies on, or bytes; the last two speak
# line by line, and each line is read where it is heard.
WITHOUT_A_TYPE = {
    "facts", "mark-stop", "release", "start", "run-remove", "collective-keep", "receive-file", "receive-checkpoint", "supervisor-put", "supervisor-discard",
    "result-part", "send-checkpoint", "converse", "result-make",
}  # fmt: skip


def test_every_answer_is_a_message() -> None:
    kinds = {name: verb.answer_type() for name, verb in VERBS.items()}
    assert {name for name, kind in kinds.items() if kind is None} == WITHOUT_A_TYPE
    assert all(issubclass(kind, Message) for kind in kinds.values() if kind is not None)


def test_the_facts_have_one_key_for_each_probe() -> None:
    assert set(Facts.model_fields) == {"node", "broken", *PROBES}
