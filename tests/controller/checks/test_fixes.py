"""What --fix offers: each command once, failures first, and aloud where it needs root."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

import pytest

from homelab.controller.base.hint import Command, Hint
from homelab.controller.checks import presentation, registry
from homelab.controller.checks.evidence import Finding
from homelab.controller.checks.machine import install_commands
from homelab.controller.checks.network import firewall
from tests.controller.checks import healthy
from tests.controller.checks.healthy import cpu, with_facts
from tests.controller.checks.test_recorded import CASES, built, judged

pytestmark = pytest.mark.timeout(10)


def test_a_command_that_mends_several_things_is_offered_once_and_failures_come_first() -> None:
    warn = Finding("python.same_build", "laptop", "warn", "another build", "pip", Command("pip install a"))
    fail = Finding("python.same", "laptop", "fail", "another version", "pip", Command("pip install b"))
    also = Finding("python.packages", "laptop", "fail", "missing", "pip", Command("pip install b"))
    found = presentation.offered_fixes([warn, fail, also])
    assert [offer.command for offer in found] == ["pip install b", "pip install a"]
    assert found[0].fixes == (fail, also)
    assert found[0].title == "laptop, python.same: another version; laptop, python.packages: missing"


def test_what_no_command_can_mend_is_left_for_the_hands() -> None:
    hands = Finding("network.wifi", "laptop", "warn", "Wi-Fi", "plug in a cable")
    fine = Finding("disk", "laptop", "ok", "20 GB free")
    assert presentation.offered_fixes([hands, fine]) == []
    assert presentation.fixed_by_hand([hands, fine]) == [hands]


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
        found = [
            finding
            for finding in registry.judge_all(with_facts(cpu(), "laptop", network={"interfaces": [interface]}))
            if finding.check == "network.mtu"
        ]
        assert [(finding.node, finding.level) for finding in found] == [("laptop", "warn")]
        assert (
            len(presentation.offered_fixes(found)) == commands
            and len(presentation.fixed_by_hand(found)) == 1 - commands
            and "mtu 1500" in found[0].hint
        )


ARCH, FEDORA, UBUNTU, GENTOO = "Arch Linux x86_64", "Fedora Linux 44 x86_64", "Ubuntu 24.04.3 LTS x86_64", "Gentoo Linux x86_64"


@pytest.mark.parametrize(
    ("system", "user", "steps"),
    [
        (
            "Debian GNU/Linux 12 (bookworm) x86_64",
            "me",
            [
                "printf '%s\\n' 'deb http://deb.debian.org/debian bookworm contrib non-free non-free-firmware' "
                "| sudo tee /etc/apt/sources.list.d/nvidia-driver.list > /dev/null",
                "sudo apt update",
                "sudo apt install nvidia-driver",
                "sudo reboot",
            ],
        ),
        (
            "Fedora Linux 44 (Workstation Edition) x86_64",
            "root",
            [
                "dnf install https://mirrors.rpmfusion.org/free/fedora/rpmfusion-free-release-$(rpm -E %fedora).noarch.rpm "
                "https://mirrors.rpmfusion.org/nonfree/fedora/rpmfusion-nonfree-release-$(rpm -E %fedora).noarch.rpm",
                "dnf install akmod-nvidia xorg-x11-drv-nvidia-cuda",
                "reboot",
            ],
        ),
        ("Ubuntu 24.04.3 LTS x86_64", "me", ["sudo ubuntu-drivers install", "sudo reboot"]),
    ],
)
def test_the_driver_of_a_repository_that_is_off(system: str, user: str, steps: list[str]) -> None:
    """As they come, Debian and Fedora know no such package."""
    seen = healthy.with_facts(healthy.gpu(), "tower", system={"os": system, "user": user})
    command = install_commands.install_driver(seen.cluster.node("tower"), seen.facts["tower"])
    assert shlex.split(command)[-1] == " && ".join(steps)


def test_debian_without_a_release_is_named_by_its_next_one() -> None:
    seen = healthy.with_facts(healthy.gpu(), "tower", system={"os": "Debian GNU/Linux forky/sid x86_64"})
    assert "debian forky contrib" in install_commands.install_driver(seen.cluster.node("tower"), seen.facts["tower"])


@pytest.mark.parametrize(
    ("system", "card", "command"),
    [
        (ARCH, "NVIDIA GeForce GTX 1080 Ti", "nvidia-580xx-dkms"), (ARCH, "Tesla M40", "nvidia-580xx-dkms"), (ARCH, "NVIDIA TITAN V", "nvidia-580xx-dkms"),
        (ARCH, "NVIDIA GeForce GTX 1650", "nvidia-open"), (ARCH, "NVIDIA Some Card", "nvidia-open"),
        (FEDORA, "NVIDIA GeForce GTX 1080 Ti", "akmod-nvidia-580xx"), (FEDORA, "NVIDIA GeForce RTX 2060", "akmod-nvidia xorg"),
        ("openSUSE Leap 15.6 aarch64", "NVIDIA L4", "in the way of its distribution"), ("Arch Linux ARM aarch64", "NVIDIA L4", "pacman -S"),
        ("Pop!_OS 22.04 LTS x86_64", "NVIDIA L4", "ubuntu-drivers"), ("Kali GNU/Linux Rolling x86_64", "NVIDIA L4", "apt install nvidia-driver"),
        (UBUNTU, "NVIDIA GeForce GTX 1080 Ti", "ubuntu-drivers install"), (GENTOO, "NVIDIA GeForce GTX 1080 Ti", "branch 580"), (GENTOO, "NVIDIA L4", "newest"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_seen", [True, False])
def test_a_card_before_turing_gets_the_last_driver_that_drives_it(system: str, card: str, command: str, is_seen: bool) -> None:
    """By what the node says of its cards, and without a driver, which shows none, by the name in cluster.toml."""
    seen = healthy.with_facts(healthy.card(healthy.gpu(), "tower", name=card), "tower", system={"os": system})
    seen = healthy.with_node(seen, "tower", gpus=({"model": card, "vram_gb": 8},))
    seen = seen if is_seen else healthy.with_facts(seen, "tower", gpu={"cards": [], "nvidia_smi": "missing"})
    hint = install_commands.install_driver(seen.cluster.node("tower"), seen.facts["tower"])
    assert command in hint, hint
    assert ("580" in hint) == ("580" in command)


def test_a_firewall_is_opened_for_the_other_nodes_where_the_lan_is_a_tunnel() -> None:
    """A tunnel's address is a network of its own: the rule let the node itself in."""
    seen, lan = cpu(), {}
    for number, name in enumerate(healthy.NAMES):
        lan[name] = (f"100.90.1.{number}", "tailscale0")
        interface = {"name": "tailscale0", "kind": "virtual", "addresses": [f"100.90.1.{number}/32"]}
        seen = with_facts(seen, name, network={"interfaces": [interface], "firewall": "ufw", "firewall_out": "ufw"})
    seen = replace(seen, lan=lan, cluster=seen.cluster.model_copy(update={"network": None}))
    assert firewall.lan_networks(seen, "tower") == ["100.90.1.1", "100.90.1.2"]
    assert shlex.split(firewall.opening(seen, "tower").fix)[-1] == "sudo ufw allow from 100.90.1.1 && sudo ufw allow from 100.90.1.2"
    assert "ufw allow out to 100.90.1.2" in firewall.letting_out(seen, "tower").fix
    for name, words in (("firewalld", "--add-source=100.90.1.2 --zone=trusted"), ("nftables", "inet hb c ip saddr 100.90.1.2 accept")):
        of_other = with_facts(seen, "tower", network={"firewall": name, "firewall_chains": ["inet hb c"]})
        assert words in firewall.opening(of_other, "tower").fix


def test_a_firewall_is_opened_for_the_nodes_of_another_subnet_too() -> None:
    seen = cpu()
    seen = replace(seen, lan={**seen.lan, "oldtower": ("10.9.0.7", "eth2")}, cluster=seen.cluster.model_copy(update={"network": None}))
    assert firewall.lan_networks(seen, "tower") == ["192.168.1.0/24", "10.9.0.7"]
