"""The topics of `homelab explain`: every rule and every known trouble has one, and what they tell a person to type exists."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homelab.cli.command_list import app
from homelab.controller.attempt import watchdog
from homelab.controller.checks import registry
from homelab.controller.config.cluster import Node
from homelab.controller.config.recipe import RecipeFile
from homelab.controller.diagnose import endings, topic_index
from homelab.controller.diagnose.rules import RULES, Rule
from homelab.controller.diagnose.topic_index import Topic
from homelab.shared.protocol.run_messages import Exit
from tests.controller.diagnose.test_recorded import EXPECTED, of
from tests.controller.diagnose.test_rules import BY_RULE
from tests.controller.features.supervise.test_watchdog import HANGS, NODES, all_signs, judge

pytestmark = pytest.mark.timeout(30)
ALL_RULES = [*RULES, *(value for value in vars(endings).values() if isinstance(value, Rule))]
EACH = pytest.mark.parametrize("topic", topic_index.TOPICS, ids=lambda topic: topic.id)

# What the two troubleshooting tables that this grew from call their rows, and what a person may type for the classics.
ASKED = {
    "connect() call failed": "connection-refused", "CUDA out of memory": "cuda-out-of-memory", 'Hangs after "initialized"': "hang-at-start",
    "One GPU slower than others": "one-slow-node", "High network overhead": "slow-wire", "Gradient NaN": "loss-nan",
    "Training diverging": "loss-diverges", "Connection refused to master-0:23456": "connection-refused",
    "NCCL WARN Call to connect returned Connection refused": "connection-refused", "NCCL timeout": "timeout",
    "Gradients not synchronizing": "ranks-disagree", "RuntimeError: NCCL error": "model-differs", "firewall": "firewall",
    "127.0.1.1": "own-name", "NCCL_SOCKET_IFNAME": "wrong-interface", "docker0": "wrong-interface", "EADDRINUSE": "port-in-use",
    "sm_120": "no-kernel-image", "Driver/library version mismatch": "driver-mismatch", "lid": "laptop-sleeps", "Wi-Fi": "wifi", "wifi": "wifi",
    "MTU": "mtu", "No space left on device": "disk-full", "gated model": "gated-model", "HF_TOKEN": "gated-model", "data differs": "data-differs",
    "loss: nan": "loss-nan", "checkpoint damaged": "checkpoint-damaged", "known_hosts": "host-key-changed", "host key changed": "host-key-changed",
    "clock skew": "clock-skew", "WSL2": "nat-wsl2", "different versions": "different-versions", "/dev/shm": "shared-memory",
    "throttle": "gpu-slow", "zombie": "stale-run", "ncclRemoteError": "connection-lost",
    "supervisor": "supervisor", "recover": "supervisor", "given up": "supervisor", "max_restarts": "supervisor",
    "rejoin": "rejoin", "left out": "rejoin", "node3 is healthy again": "rejoin", "freeze": "frozen-rank", "frozen": "frozen-rank", "SIGSTOP": "frozen-rank",
    "kill-worker": "dead-rank", "power-cut": "silent-node", "Xid": "gpu-lost", "publickey": "ssh-login",
}  # fmt: skip


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.id)
def test_every_rule_has_one_topic(rule: Rule) -> None:
    found = topic_index.of_rule(rule.id)
    assert found is not None, f"no topic names the rule {rule.id}"
    assert [topic.id for topic in topic_index.TOPICS if rule.id in topic.rules] == [found.id]
    assert topic_index.find(rule.id) == (topic_index.of_rule(rule.id),) or rule.id in {topic.id for topic in topic_index.TOPICS}


def test_every_ending_is_listed() -> None:
    assert {rule.id for rule in endings.ENDINGS} | {rule.id for rule in RULES} == {rule.id for rule in ALL_RULES}


def test_a_topic_is_named_after_its_own_rule_or_after_none() -> None:
    """`homelab explain ID` of a rule must not show another rule's topic."""
    ids = {topic.id: topic for topic in topic_index.TOPICS}
    assert [rule.id for rule in ALL_RULES if rule.id in ids and rule.id not in ids[rule.id].rules] == []


@EACH
def test_topics_name_rules_and_checks_that_exist(topic: Topic) -> None:
    assert set(topic.rules) <= {rule.id for rule in ALL_RULES}
    assert set(topic.checks) | set(topic.checks_too) <= {check.id for check in registry.CHECKS}
    assert not set(topic.checks) & set(topic.checks_too)


def test_ids_and_checks_belong_to_one_topic_each() -> None:
    for names in ([topic.id for topic in topic_index.TOPICS], [check for topic in topic_index.TOPICS for check in topic.checks]):
        assert len(names) == len(set(names)), [name for name in names if names.count(name) > 1]


@pytest.mark.parametrize("check", [check.id for check in registry.CHECKS])
def test_a_check_finds_its_topic(check: str) -> None:
    own = [topic for topic in topic_index.TOPICS if check in topic.checks]
    assert len(own) == 1 and list(topic_index.find(check)) == own


@EACH
def test_topics_say_all_four_things(topic: Topic) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", topic.id)
    assert topic.seen and topic.do and all(text.strip() == text and text for text in (topic.title, topic.cause, *topic.seen, *topic.do))
    assert topic.cause.endswith(".") and not topic.title.endswith(".")
    assert topic_index.find(topic.id) == (topic,) and topic_index.find(topic.id.upper()) == (topic,)
    re.compile(topic.says)


@EACH
def test_what_a_person_is_told_to_type_exists(topic: Topic) -> None:
    text = "\n".join(topic.do)
    commands = {command.name for command in app.registered_commands}
    for name, rest in re.findall(r"\bhomelab (\w+)([^;:\n]*)", text):
        assert name in commands, f"homelab {name}"
        if name == "explain":
            assert rest.split()[0].strip(",.)") in {other.id for other in topic_index.TOPICS}, rest
    for check in re.findall(r"--only ([a-z0-9_.]+)", text):
        assert check in registry.IDS, check
    for section, key in re.findall(r"\[([a-z]+)\] (\w+)\b", text):
        if section in RecipeFile.model_fields and key not in ("or", "that", "is", "opens", "changed"):
            assert key in known_keys(section), f"[{section}] {key}"
    for key in re.findall(r"(\w+)(?: = \S+)? at the node in cluster.toml", text):
        assert key in Node.model_fields, key


def known_keys(section: str) -> set[str]:
    annotation = RecipeFile.model_fields[section].annotation
    model = next(part for part in (annotation, *getattr(annotation, "__args__", ())) if is_dataclass(part))
    return {field.name for field in fields(model)}


@pytest.mark.parametrize(("asked", "expected"), ASKED.items())
def test_what_a_person_may_ask(asked: str, expected: str) -> None:
    assert [topic.id for topic in topic_index.find(asked)] == [expected]


@pytest.mark.parametrize("rule", BY_RULE)
def test_a_line_of_a_log_finds_its_topic(rule: str) -> None:
    for line in BY_RULE[rule]:
        assert topic_index.find(line) == (topic_index.of_rule(rule),), line


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"laptop": {"rank_state": ""}}, "dead-rank"),
        ({"laptop": {"exit": Exit(returncode=1), "rank_state": ""}}, "dead-rank"),
        ({"laptop": {"torchrun": "", "rank_phase": "loading"}}, "dead-rank"),
        ({"laptop": {"rank_state": "T", "rank_still_s": 3.5}}, "frozen-rank"),
        (dict.fromkeys(NODES, HANGS), "hang"),
        ({"tower": HANGS, "laptop": {"heard_s": 6.0}, "oldtower": HANGS}, "silent-node"),
        ({"tower": {"missing_s": {"laptop": 9.0}}, "laptop": {"heard_s": 6.0}}, "silent-node"),
        ({"laptop": {"heard_s": 60.0}}, "silent-node"),
        ({"tower": {"newest": 2}}, "supervisor"),
    ],
)
def test_a_verdict_in_the_words_of_the_watchdog_finds_its_topic(changes: dict[str, dict[str, object]], expected: str) -> None:
    verdict = judge(all_signs(**changes))
    for said in (verdict.because, f"12:01:02  {verdict.because}"):
        assert [topic.id for topic in topic_index.find(said)] == [expected], said
    if verdict.is_trouble:
        assert topic_index.find(verdict.kind), verdict.kind


@pytest.mark.parametrize("kind", sorted(watchdog.TROUBLE - {"exit"}))
def test_every_trouble_has_a_topic_of_its_name(kind: str) -> None:
    assert [topic.id for topic in topic_index.find(kind)] == [kind]


def test_what_is_given_up_for_a_known_cause_finds_the_cause() -> None:
    assert [topic.id for topic in topic_index.find("given up: CUDA out of memory. Tried to allocate 22.00 MiB")] == ["cuda-out-of-memory"]
    assert [topic.id for topic in topic_index.find("given up: something; 5 restarts within the last hour")] == ["supervisor"]


def test_a_word_that_several_share_lists_them() -> None:
    assert {"timeout", "connection-refused", "wrong-interface"} <= {topic.id for topic in topic_index.find("nccl")}
    assert {"wifi", "mtu", "firewall"} <= {topic.id for topic in topic_index.find("network")}
    assert {topic.id for topic in topic_index.find("gpu.unheard")} <= {topic.id for topic in topic_index.find("gpu")}


@pytest.mark.parametrize("asked", ["", "  ", "...", "zxqv", "wherefore art thou", "a.b"])
def test_what_nobody_knows(asked: str) -> None:
    assert topic_index.find(asked) == ()


def test_what_is_seen_is_looked_through_before_the_cause() -> None:
    (timeout,) = topic_index.find("waiting")
    (loss,) = topic_index.find("powerline")
    assert (timeout.id, loss.id) == ("timeout", "packet-loss") and "power-line" in loss.cause and "waiting" in loss.cause
    assert "waiting" in " ".join(timeout.seen) and "waiting" not in f"{timeout.title} {timeout.words}"


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_nothing_that_is_asked_breaks_it(asked: str) -> None:
    assert all(topic in topic_index.TOPICS for topic in topic_index.find(asked))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("a file of the checkpoint was altered: its sha256 differs", "checkpoint-damaged"),
        ("the checkpoint of step 50 cannot be written: No space", "disk-full"),
        ("the model cannot be loaded: meta-llama/x is a gated repo", "gated-model"),
        ("the model cannot be loaded: Error while deserializing header", "model-differs"),
        ("the data file differs from the one this run was launched with", "data-differs"),
        ("this line is not JSON: Expecting value", "data-unreadable"),
        ("the data is chat, but the model's tokenizer has no chat template", "chat-template"),
        ("the plan needs CUDA, but torch sees no GPU here", "driver-mismatch"),
        ("the loss is not a number in step 7 on rank 1", "loss-nan"),
        ("ValueError: gradients were aggregated twice", "python-error"),
        ("", "python-error"),
    ],
)
def test_what_a_worker_says_of_itself_names_the_topic(message: str, expected: str) -> None:
    for rule in ("worker-error", "python-error"):
        found = topic_index.of_rule(rule, message)
        assert found is not None and found.id == expected
    assert topic_index.of_rule("disk-full", message) == topic_index.find("disk-full")[0]
    assert topic_index.of_rule("no such rule", message) is None


@pytest.mark.parametrize("scenario", EXPECTED)
def test_a_diagnosis_names_its_topic(scenario: str) -> None:
    found = of(scenario)
    topic = topic_index.of_rule(EXPECTED[scenario].cause)
    assert topic is not None and found.topic == topic.id
