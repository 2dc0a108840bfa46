"""Each rule against words that were really printed, and the rules as data."""

from __future__ import annotations

import math
import re
import string
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homelab.controller.diagnose import endings, topic_index
from homelab.controller.diagnose.matching import best_rule
from homelab.controller.diagnose.rules import RULES, Rule
from homelab.controller.diagnose.traces import child_failures, last_exceptions
from homelab.worker.errors import first_words
from tests.controller.diagnose.test_cause import found, node, traceback

SAMPLES = tomllib.loads((Path(__file__).parent / "samples.toml").read_text())
LINES = [(rule, line.strip()) for rule, entry in SAMPLES.items() if rule != "survived" for line in entry["lines"]]
# One test for the samples of one rule: a test for each would cost more time than what it tries.
BY_RULE = {rule: [line for name, line in LINES if name == rule] for rule in SAMPLES if rule != "survived"}

ENDINGS = [value for value in vars(endings).values() if isinstance(value, Rule)]
FILLED = dict.fromkeys(("node", "on_node", "rank", "run", "where", "message", "code", "signal", "recover", "logs", "status", "launch"), "x")


@pytest.mark.parametrize("cause", BY_RULE)
def test_the_words_of_a_cause(cause: str) -> None:
    for line in BY_RULE[cause]:
        found = best_rule(line)
        assert found is not None and found[0].id == cause, line


@pytest.mark.parametrize(("cause", "line"), [(cause, line) for cause, line in LINES if "DistBackendError" in line and "\n@ " not in line])
def test_the_words_of_a_cause_in_a_worker_s_own_account(cause: str, line: str) -> None:
    """error.json has one line, and NCCL's reason comes behind torch's first one; then comes a stack."""
    kind = type("DistBackendError", (RuntimeError,), {})
    found = best_rule(first_words(kind(line.partition(": ")[2] + "\nException raised from x at y.cpp:1\nframe #0: <unknown>")))
    assert found is not None and found[0].id == cause
    assert first_words(kind("plain\nstack")) == "DistBackendError: plain" and first_words(kind("")) == "DistBackendError: "


@pytest.mark.parametrize("cause", BY_RULE)
def test_no_two_rules_claim_the_same_words_with_equal_right(cause: str) -> None:
    """Whatever the order of the files: one rule is more specific than all others that match."""
    for line in BY_RULE[cause]:
        matching = sorted(((rule.specificity, rule.id) for rule in RULES if rule.pattern.search(line)), reverse=True)
        assert matching[0][1] == cause and (len(matching) == 1 or matching[1][0] < matching[0][0]), (line, matching)


def test_every_rule_is_tried_here() -> None:
    assert {rule.id for rule in RULES} == {cause for cause, _ in LINES}


@pytest.mark.parametrize(
    "line",
    [
        "{'loss': 1.204, 'grad_norm': 0.41, 'learning_rate': 0.0002, 'epoch': 0.31}",
        "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.",
        "[rank0]:[W1121 03:13:01 ProcessGroupNCCL.cpp:1250] Warning: process group has NOT been destroyed",
        "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",
        "connection timeout is set to 120 s",
        "step 28 of 1000, nan_count 0",
        "KeyError: 'completion'",
        # bitsandbytes 0.49, at the first 4-bit layer on a CPU: it goes on without the package
        "Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'. Please make sure you already `pip install kernels`",
    ],
)
def test_ordinary_lines_mean_nothing(line: str) -> None:
    assert best_rule(line) is None


def test_ids_are_unique() -> None:
    ids = [rule.id for rule in (*RULES, *ENDINGS)]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("rule", [*RULES, *ENDINGS], ids=lambda rule: rule.id)
def test_titles_and_hints_name_only_what_is_known(rule: Rule) -> None:
    of_script = ("module", "local") if rule.id == "not-shipped" else ()
    known = FILLED | dict.fromkeys((*rule.pattern.groupindex, "port", "way", "who", "target", *of_script), "x")
    for template in (rule.title, rule.hint):
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name}
        assert names <= set(known)
    assert "ssh" not in rule.hint.replace("ssh-", ""), "{on_node:COMMAND} knows the port, the key and the known hosts"
    assert rule.hint.strip() and rule.title.strip()


# The place where the failure was seen, with the word that leads to it; and the command that starts once more.
POINTER = re.compile(r"(?:\b(?:see|in|at|read|look at|called from)\s+)?\{(?:where|raised_at|logs|message)\}")
AGAIN = re.compile(r"\{(?:recover|launch|status)\}")
COMMAND_OR_EDIT = re.compile(r"\{on_node:|\{way\}|\bhomelab [a-z]|\bsudo |--\w|\w = \S")
ACTION = re.compile(r"\b(?:accept|allow|connect|correct|give|install|leave|let|load|lower|name|put|remove|restart|take|use)\b")
TEMPLATES = {rule.id: (rule.hint, rule.retryable) for rule in (*RULES, *ENDINGS)} | {
    name: (text, False) for name, text in vars(endings).items() if name.endswith("_HINT")
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hint_says_what_to_do_and_not_only_where_the_failure_was_seen(name: str) -> None:
    hint, is_retryable = TEMPLATES[name]
    beside = AGAIN.sub("", POINTER.sub("", hint))
    does = COMMAND_OR_EDIT.search(beside) or ACTION.search(beside)
    assert does or (is_retryable and "{recover}" in hint), f"only a pointer: {hint}"
    assert AGAIN.search(hint) or "homelab preflight" in hint, f"and then? {hint}"


@pytest.mark.parametrize("rule", [*RULES, *ENDINGS], ids=lambda rule: rule.id)
def test_a_recipe_that_is_edited_takes_a_new_training(rule: Rule) -> None:
    """`homelab recover` goes on by the copy of the recipe that the run has."""
    edit = re.search(r"\[(?:parallel|train|data|model|method)\]|in the recipe\b(?! of the next)", rule.hint)
    assert edit is None or "{launch}" in rule.hint[edit.start() :], rule.hint


def test_what_the_hint_says_first_is_what_comes_next() -> None:
    full = found(node("mini", 1, traceback("torch.OutOfMemoryError: CUDA out of memory.")))
    assert full.launch == "" and "homelab recover r" in full.hint and "homelab launch RECIPE" in full.hint
    assert found(node("mini", 1, traceback("ValueError: Your setup doesn't support bf16/gpu."))).launch == "homelab launch RECIPE"


@pytest.mark.parametrize(
    "hint",
    ["see {where}", "its log may say more: {logs}", "look at {logs}; then: {recover}", "the data is wrong; see {where}", "at {where}"],
)
def test_a_pointer_alone_is_none(hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TEMPLATES, "pointer", (hint, False))
    with pytest.raises(AssertionError, match="only a pointer"):
        test_a_hint_says_what_to_do_and_not_only_where_the_failure_was_seen("pointer")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_victims_and_symptoms_are_less_specific_than_any_cause(rule: Rule) -> None:
    assert (rule.specificity >= 50) == (rule.role == "cause")


PIECES = st.sampled_from(
    ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "    x()", "KeyError: 'x'", "", "MemoryError",
     "During handling of the above exception, another exception occurred:", "Root Cause (first observed failure):",
     "[0]:", "  rank      : 1 (local_rank: 0)", "  exitcode  : -9 (pid: 1)", "  time      : tomorrow", "-" * 60,
     "  traceback : Signal 9", "[rank0]: ValueError: a", "torch.distributed.elastic.x.ChildFailedError: "]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(PIECES, st.text(max_size=40)), max_size=40))
def test_no_log_can_make_the_readers_fail(lines: list[str]) -> None:
    for failure in child_failures(lines, 1e9):
        assert (failure.exit_code is None) != (failure.signal is None)
        assert failure.time_s is None or math.isfinite(failure.time_s)
    for raised in last_exceptions(lines):
        assert raised.text


# What holds for a machine of its own and not inside of WSL: there the driver, its module and the machine are those of Windows.
OF_THE_MACHINE = re.compile(
    r"\breboot\b|\brestart (?:\{node\}|the (?:node|machine))|\brmmod\b|\b(?:newer|renew the|install a) driver\b", re.IGNORECASE
)
TEXTS = {rule.id: rule.hint for rule in (*RULES, *ENDINGS)} | {
    f"topic {topic.id}: {step[:30]}": " ".join(topic.do) for topic in topic_index.TOPICS for step in topic.do if OF_THE_MACHINE.search(step)
}


def test_a_fix_that_restarts_a_machine_or_renews_its_driver_says_what_to_do_in_wsl() -> None:
    speaking = {name for name, text in TEXTS.items() if OF_THE_MACHINE.search(text)}
    assert {name for name in speaking if "WSL" not in TEXTS[name]} == {"node-restarted"}, "that one only tells what may have happened"
    assert len(speaking) > 10
