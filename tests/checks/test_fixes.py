"""What --fix offers: each command once, failures first, and aloud where it needs root."""

from __future__ import annotations

import pytest

from homelab.checks import fixes, registry
from homelab.checks.evidence import Finding
from tests.checks.healthy import cpu, with_facts

pytestmark = pytest.mark.timeout(10)


def test_a_command_that_mends_several_things_is_offered_once_and_failures_come_first() -> None:
    warn = Finding("python.same_build", "laptop", "warn", "another build", "pip", "pip install a")
    fail = Finding("python.same", "laptop", "fail", "another version", "pip", "pip install b")
    also = Finding("python.packages", "laptop", "fail", "missing", "pip", "pip install b")
    found = fixes.offered([warn, fail, also])
    assert [offer.command for offer in found] == ["pip install b", "pip install a"]
    assert found[0].mends == (fail, also)
    assert found[0].title == "laptop, python.same: another version; laptop, python.packages: missing"


def test_what_no_command_can_mend_is_left_for_the_hands() -> None:
    hands = Finding("network.wifi", "laptop", "warn", "Wi-Fi", "plug in a cable")
    fine = Finding("disk", "laptop", "ok", "20 GB free")
    assert fixes.offered([hands, fine]) == []
    assert fixes.by_hand([hands, fine]) == [hands]


@pytest.mark.parametrize(
    ("command", "needs_root"),
    [
        ("ssh -t me@10.0.0.1 'sudo ufw allow from 10.0.0.0/24'", True),
        ("sudo timedatectl set-ntp true", True),
        ("ssh me@10.0.0.1 'mkdir -p a && sudo mount b'", True),
        ("ssh me@10.0.0.1 '~/env/bin/python -m pip install pseudo sudoku'", False),
        ("homelab stop 2026-run", False),
    ],
)
def test_sudo_is_never_hidden(command: str, needs_root: bool) -> None:
    assert fixes.Fix(command, ()).needs_root is needs_root


def test_a_smaller_mtu_is_not_undone_by_a_command_and_a_larger_one_is() -> None:
    """It may be the mend of network.path_mtu: `--fix --yes` would take it back, find that packets vanish, and lower it again."""
    for size, commands in ((1400, 0), (9000, 1)):
        interface = {"name": "eth1", "addresses": ["192.168.1.101/24"], "mtu": size}
        found = [finding for finding in registry.judge_all(with_facts(cpu(), "laptop", interfaces=[interface])) if finding.check == "network.mtu"]
        assert [(finding.node, finding.level) for finding in found] == [("laptop", "warn")]
        assert len(fixes.offered(found)) == commands and len(fixes.by_hand(found)) == 1 - commands and "mtu 1500" in found[0].hint
