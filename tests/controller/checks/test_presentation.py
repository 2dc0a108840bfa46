"""The findings as a table for people and as JSON for programs."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any, cast

import pytest
from rich.console import Console

from homelab.controller.base.errors import UnreachableError
from homelab.controller.checks import presentation, registry
from homelab.controller.checks.evidence import Evidence, Finding, Level
from tests.controller.checks.healthy import NAMES, cpu, cut, gpu, packages, recipe, unreachable, with_facts

pytestmark = pytest.mark.timeout(20)


def printed(evidence: Evidence, width: int = 80, *, soft_wrap: bool = False, skip: frozenset[str] = frozenset()) -> str:
    names = [node.name for node in evidence.cluster.nodes]
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(presentation.table(registry.judge_all(evidence, skip), names), soft_wrap=soft_wrap)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_healthy_cluster_is_a_calm_table_of_80_columns() -> None:
    lines = printed(gpu(recipe())).splitlines()
    assert max(map(len, lines)) <= 80
    # One row each (a second line begins with spaces) and nothing to mend; the collective test was not run, and there is no plan: two notes.
    assert len([line for line in lines[1 : lines.index("")] if line[0] != " "]) == len(registry.SUBJECTS) - 2
    assert len(lines[lines.index("") :]) == 3
    assert all(name in lines[0] for name in NAMES)
    assert not any("FAIL" in line or "warn" in line for line in lines)
    assert ["python", "ok", "torch"] in [line.split()[:3] for line in lines]


def test_what_is_broken_is_marked_at_its_node_and_listed_with_its_fix() -> None:
    evidence = with_facts(cut(cpu(), ("tower", "laptop")), "oldtower", power={"source": "battery"})
    text = printed(evidence)
    assert max(map(len, text.splitlines())) <= 80
    network = next(line for line in text.splitlines() if line.startswith("network"))
    assert network.index("FAIL") == text.splitlines()[0].index("laptop")
    assert text.index("FAIL laptop, network.reach:") < text.index("warn oldtower, power.battery:")
    assert "fix: ssh -t me@192.168.1.101 'sudo ufw allow from 192.168.1.0/24'" in " ".join(text.split())


def test_without_wrapping_a_fix_is_one_line_that_can_be_pasted() -> None:
    text = printed(packages(cpu(), "laptop", peft=None, accelerate=None, transformers=None), soft_wrap=True)
    wanted = "  fix: ssh me@192.168.1.101 '~/.homelab/env/bin/python -m pip install transformers==5.23.0 peft==0.19.0 accelerate==1.15.0'"
    assert wanted in text.splitlines()


def test_a_node_that_did_not_answer_has_a_dash_where_nothing_was_judged() -> None:
    text = printed(unreachable(cpu(), "laptop", UnreachableError("no answer within 10 s", hint="wake it")))
    disk = next(line for line in text.splitlines() if line.startswith("disk"))
    assert disk[text.splitlines()[0].index("laptop")] == "-"
    assert "fix: wake it" in text


def test_skipped_checks_share_one_line() -> None:
    text = printed(cpu(), skip=registry.skipped(only=["network"], skip=[]))
    assert " ".join(text.split()).count(registry.SKIPPED) == 1
    assert [line.split()[0] for line in text.splitlines()[:2]] == ["check", "network"]


def test_the_controller_is_called_this_machine() -> None:
    text = printed(replace(cpu(), clock_offsets_s=dict.fromkeys(NAMES, 3.0)))
    assert "warn this machine, clock.skew:" in text


def test_ten_nodes_still_fit() -> None:
    names = [f"node{number}" for number in range(1, 11)]
    findings = [Finding("ssh", name, "fail" if name == "node7" else "ok", "a long message about it", "do it") for name in names]
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(presentation.table(findings, names))
    assert isinstance(console.file, io.StringIO)
    header, row = console.file.getvalue().splitlines()[:2]
    assert row.index("FAIL") == header.index("node7")


def test_with_many_nodes_a_row_counts_them_and_names_those_in_trouble() -> None:
    names = [f"node{number}" for number in range(1, 25)]
    findings = [Finding("ssh", name, "ok", "m") for name in names if name != "node7"]
    findings += [Finding("ssh.login", "node7", "fail", "m", "h"), Finding("ssh.slow", "node9", "warn", "m", "h")]
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(presentation.table(findings, names))
    assert isinstance(console.file, io.StringIO)
    row = console.file.getvalue().splitlines()[1].split()
    assert row == ["ssh", "22", "of", "24", "node9", "node7"]


def test_what_differs_is_a_table_of_its_own() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(presentation.table([], NAMES, [("peft", {"tower": "0.19.0", "laptop": "0.18.1", "oldtower": "0.19.0"})]))
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["What", "differs"] in lines and ["peft", "0.19.0", "0.18.1", "0.19.0"] in lines


def test_markup_in_a_message_is_shown_as_it_is() -> None:
    findings = [Finding("ssh", "tower", "fail", "it said [red]no[/red]", "look [here]")]
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(presentation.table(findings, ["tower"]))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "FAIL tower, ssh: it said [red]no[/red]" in text and "fix: look [here]" in text


def test_the_worst_level_and_the_json() -> None:
    ok, warn, fail = (Finding("disk", "tower", level, "m", "h") for level in ("ok", "warn", "fail"))
    assert presentation.worst([]) == "ok"
    assert presentation.worst([ok, warn, ok]) == "warn"
    assert presentation.worst([fail, warn, ok]) == "fail"
    assert json.loads(json.dumps(presentation.as_json([fail]))) == [
        {"check": "disk", "node": "tower", "level": "fail", "message": "m", "hint": "h", "fix": ""}
    ]


@pytest.mark.parametrize(
    ("levels", "told", "said"),
    [
        ({}, {}, "Ready to train: nothing fails on 3 nodes."),
        ({}, {"is_all": False}, "Ready to train, as far as it was checked: nothing fails on 3 nodes."),
        ({"tower": "warn"}, {}, "Ready to train: nothing fails on 3 nodes (1 warning on tower)."),
        ({"tower": "fail", "laptop": "warn"}, {}, "Not ready to train: 1 fault on tower."),
        ({"tower": "fail", "": "fail"}, {}, "Not ready to train: 2 faults on tower, this machine."),
        ({"tower": "warn"}, {"refused": "the model does not fit"}, "Not ready to train: the model does not fit"),
        ({"tower": "busy"}, {}, "Nothing fails, and tower has other work."),
    ],
)
def test_the_first_line_is_the_answer(levels: dict[str, str], told: dict[str, Any], said: str) -> None:
    findings = [
        Finding("gpu.memory", node, "ok" if level == "busy" else cast("Level", level), f"of {node}", is_busy=level == "busy")
        for node, level in levels.items()
    ]
    assert presentation.answer(findings, NAMES, **told).plain == said
