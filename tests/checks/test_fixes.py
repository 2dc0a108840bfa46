"""What --fix offers: each command once, failures first, and aloud where it needs root."""

from __future__ import annotations

import re

import pytest

from homelab.checks import fixes, registry
from homelab.checks.evidence import Finding
from homelab.text.hint import Command, Hint
from tests.checks.healthy import cpu, with_facts
from tests.checks.test_recorded import CASES, built, judged

pytestmark = pytest.mark.timeout(10)


def test_a_command_that_mends_several_things_is_offered_once_and_failures_come_first() -> None:
    warn = Finding("python.same_build", "laptop", "warn", "another build", "pip", Command("pip install a"))
    fail = Finding("python.same", "laptop", "fail", "another version", "pip", Command("pip install b"))
    also = Finding("python.packages", "laptop", "fail", "missing", "pip", Command("pip install b"))
    found = fixes.offered([warn, fail, also])
    assert [offer.command for offer in found] == ["pip install b", "pip install a"]
    assert found[0].fixes == (fail, also)
    assert found[0].title == "laptop, python.same: another version; laptop, python.packages: missing"


def test_what_no_command_can_mend_is_left_for_the_hands() -> None:
    hands = Finding("network.wifi", "laptop", "warn", "Wi-Fi", "plug in a cable")
    fine = Finding("disk", "laptop", "ok", "20 GB free")
    assert fixes.offered([hands, fine]) == []
    assert fixes.by_hand([hands, fine]) == [hands]


def test_sudo_is_never_hidden() -> None:
    """A field says whether `--fix --yes` leaves a command out, and whether it gets a terminal: of every recorded fix it agrees with the text."""
    commands = [finding.fix for check, case in CASES for finding in judged(check, built(case)) if finding.fix]
    assert len(commands) > 20
    for command in commands:
        assert command.needs_root is bool(re.search(r"(^|[\s'\"&;|])sudo ", command)), command
        for line in command.steps or (command,):
            assert line.startswith("ssh -t ") is (line.startswith("ssh ") and line.needs_root), line


def test_a_hint_knows_the_commands_of_ours_in_it() -> None:
    """Else the options --cluster and --runs-dir would be lost."""
    seen = 0
    for check, case in ((check, case) for check, case in CASES if not case.unreachable):  # their hints are text of the case
        for finding in judged(check, built(case)):
            assert isinstance(finding.hint, Hint)
            ours = [line.own_name for command in finding.hint.commands for line in command.steps or (command,) if line.own_name]
            assert ours == [command.own_name for command in Hint.said(str(finding.hint)).commands], finding.hint
            seen += len(ours)
    assert seen > 20


def test_a_smaller_mtu_is_not_undone_by_a_command_and_a_larger_one_is() -> None:
    """It may be the mend of network.path_mtu: `--fix --yes` would take it back, find that packets vanish, and lower it again."""
    for size, commands in ((1400, 0), (9000, 1)):
        interface = {"name": "eth1", "addresses": ["192.168.1.101/24"], "mtu": size}
        found = [finding for finding in registry.judge_all(with_facts(cpu(), "laptop", network={"interfaces": [interface]})) if finding.check == "network.mtu"]
        assert [(finding.node, finding.level) for finding in found] == [("laptop", "warn")]
        assert len(fixes.offered(found)) == commands and len(fixes.by_hand(found)) == 1 - commands and "mtu 1500" in found[0].hint
