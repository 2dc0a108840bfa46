"""What a node says of its interfaces, its firewall and WSL; the kernel's files are laid out in a folder."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from homelab.node.probes import network
from homelab.node.system import firewall, ports
from homelab.shared.protocol import files
from tests.fakes import ask_node
from tests.processes import living

pytestmark = pytest.mark.timeout(20)


@pytest.mark.parametrize(
    ("name", "files", "kind"),
    [
        ("lo", [], "loopback"),
        ("enp3s0", ["device/vendor"], "physical"),
        ("wlp2s0", ["wireless/link"], "wifi"),
        ("wlan1", ["phy80211/index"], "wifi"),
        ("docker0", ["brif/veth1"], "virtual"),
        ("br-0f3a", [], "virtual"),
        ("lxdbr0", [], "virtual"),
        ("tailscale0", ["tun_flags"], "virtual"),
        ("company-vpn", ["tun_flags"], "virtual"),
        ("ztabcdef", [], "virtual"),
        ("wg0", [], "virtual"),
        ("bond0", ["bonding/mode"], "physical"),
    ],
)
def test_kinds_of_interfaces(tmp_path: Path, name: str, files: list[str], kind: str) -> None:
    for file in files:
        (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / file).touch()
    assert ports.kind(name, str(tmp_path)) == kind


def test_a_bridge_is_physical_when_a_cable_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "br0" / "brif" / "enp3s0").mkdir(parents=True)
    (tmp_path / "br0" / "brif" / "vnet3").mkdir()
    assert ports.kind("br0", str(tmp_path)) == "virtual"
    (tmp_path / "enp3s0" / "device").mkdir(parents=True)
    assert ports.kind("br0", str(tmp_path)) == "physical"


@pytest.mark.parametrize(
    "bridge, below",
    [
        ("vmbr0", ["bond0", "enp3s0"]),
        ("vmbr0", ["eth0.10", "eth0"]),
        ("br0", ["bond0.10", "bond0", "eth0"]),
        ("br-lan", ["eth0"]),
        ("lxdbr0", ["eth0"]),
    ],
)
def test_a_bridge_over_a_bond_or_a_vlan_is_physical_whatever_its_name(tmp_path: Path, bridge: str, below: list[str]) -> None:
    (tmp_path / bridge / "brif" / below[0]).mkdir(parents=True)
    (tmp_path / bridge / "brif" / "veth1").mkdir()
    (tmp_path / "veth1").mkdir()
    for upper, lower in pairwise(below):
        (tmp_path / upper / f"lower_{lower}").mkdir(parents=True)
    assert ports.kind(bridge, str(tmp_path)) == "virtual"
    (tmp_path / below[-1] / "device").mkdir(parents=True)
    assert ports.kind(bridge, str(tmp_path)) == "physical"


def test_interfaces_that_name_each_other_are_no_device(tmp_path: Path) -> None:
    (tmp_path / "br0" / "brif" / "a").mkdir(parents=True)
    (tmp_path / "a" / "lower_b").mkdir(parents=True)
    (tmp_path / "b" / "lower_a").mkdir(parents=True)
    assert ports.kind("br0", str(tmp_path)) == "virtual"


def test_a_wireguard_by_any_name(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "uevent").write_text("DEVTYPE=wireguard\nINTERFACE=home\nIFINDEX=7\n")
    assert ports.kind("home", str(tmp_path)) == "virtual"


def test_this_machine() -> None:
    loopback = next(entry for entry in ports.interfaces() if entry["name"] == "lo")
    assert "127.0.0.1/8" in loopback["addresses"] and loopback["up"] and loopback["mtu"]
    assert ports.routes(["127.0.0.9", "no address"]) == {"127.0.0.9": {"interface": "lo", "source": "127.0.0.1"}}
    assert network.wsl() is None


def test_wsl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    osrelease, interfaces, programs = tmp_path / "osrelease", tmp_path / "net", tmp_path / "bin"
    osrelease.write_text("5.15.167.4-microsoft-standard-WSL2\n")
    interfaces.mkdir()
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    assert network.wsl(str(osrelease), str(interfaces)) == "nat"
    (interfaces / "loopback0").mkdir()
    assert network.wsl(str(osrelease), str(interfaces)) == "mirrored"
    (programs / "wslinfo").write_text("#!/bin/sh\necho virtioproxy\n")
    (programs / "wslinfo").chmod(0o755)
    assert network.wsl(str(osrelease), str(interfaces)) == "virtioproxy"
    assert network.wsl(str(tmp_path / "none"), str(interfaces)) is None


def test_ufw_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "ufw.conf"
    file.write_text("# /etc/ufw/ufw.conf\n#\n\n# Set to yes to start on boot.\nENABLED=no\n\nLOGLEVEL=low\n")
    assert not firewall._ufw_is_enabled(str(file))
    file.write_text("ENABLED=yes\nLOGLEVEL=low\n")
    assert firewall._ufw_is_enabled(str(file))
    assert not firewall._ufw_is_enabled(str(tmp_path / "none"))


def test_ufw_that_stops_what_leaves(tmp_path: Path) -> None:
    file = tmp_path / "ufw"
    for policy, stops in (("ACCEPT", False), ("DROP", True), ("REJECT", True)):
        file.write_text(f'IPV6=yes\nDEFAULT_INPUT_POLICY="DROP"\nDEFAULT_OUTPUT_POLICY="{policy}"\n')
        assert firewall._ufw_stops_out(str(file)) is stops
    assert not firewall._ufw_stops_out(str(tmp_path / "none"))


def test_firewalld_by_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Fedora starts it: /usr/bin/python3 -sP /usr/sbin/firewalld --nofork --nopid."""
    (tmp_path / "self").mkdir()
    (tmp_path / "812").mkdir()
    (tmp_path / "812" / "comm").write_text("firewalld-not\n")
    assert not firewall._runs_firewalld(str(tmp_path))
    (tmp_path / "813").mkdir()
    (tmp_path / "813" / "comm").write_text("firewalld\n")
    assert firewall._runs_firewalld(str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(firewall, "_ufw_is_enabled", lambda: False)
    monkeypatch.setattr(firewall, "_runs_firewalld", lambda: True)
    assert firewall.look()["firewall"] == "firewalld"


def test_firewalld_by_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = "table inet firewalld {\n\tchain filter_INPUT {\n\t\ttype filter hook input priority 10; policy accept;\n\t\treject\n\t}\n}\n"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(firewall, "_ufw_is_enabled", lambda: False)
    monkeypatch.setattr(firewall, "_ruleset", lambda: rules)
    found = firewall.look()
    assert (found["firewall"], found["firewall_chains"]) == ("firewalld", [])


def test_what_leaves_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ruleset = "table inet hb {\n\tchain c {\n\t\ttype filter hook output priority 0; policy accept;\n\t\treject\n\t}\n}\n"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(firewall, "_ufw_is_enabled", lambda: False)
    monkeypatch.setattr(firewall, "_runs_firewalld", lambda: False)
    for rules, out, is_seen in ((ruleset, ["inet hb c"], True), ("", [], True), (None, [], False)):
        monkeypatch.setattr(firewall, "_ruleset", lambda rules=rules: rules)
        monkeypatch.setattr(firewall, "_nftables_conf", lambda: "")
        assert firewall.look() == {
            "firewall": None, "firewall_chains": [], "firewall_out": "nftables" if out else None, "firewall_out_chains": out, "firewall_seen": is_seen,
        }  # fmt: skip


def test_nftables_of_a_login_that_may_not_ask(tmp_path: Path) -> None:
    """Debian's file, with a policy of drop; it counts where the service loads it."""
    (tmp_path / "nftables.conf").write_text(
        "#!/usr/sbin/nft -f\n\nflush ruleset\n\ntable inet filter {\n\tchain input {\n\t\ttype filter hook input priority filter;\n"
        "\t\tpolicy drop;\n\t}\n\tchain output {\n\t\ttype filter hook output priority filter; # drop nothing\n\t}\n}\n"
    )
    assert firewall._nftables_conf(str(tmp_path)) == ""
    service = tmp_path / "systemd" / "system" / "sysinit.target.wants" / "nftables.service"
    service.parent.mkdir(parents=True)
    service.symlink_to("/dev/null")
    assert firewall.parse_nft(firewall._nftables_conf(str(tmp_path))) == ["inet filter input"]


def test_chains_of_nftables() -> None:
    jumps = (
        "table inet fw {\n\tchain a {\n\t\ttype filter hook input priority 0; policy accept;\n\t\tjump b\n\t}\n\n"
        "\tchain b {\n\t\tjump a\n\t\tgoto c\n\t}\n\n\tchain c {\n\t\ttcp dport 1 reject\n\t}\n}\n"
    )
    assert firewall.parse_nft(jumps) == ["inet fw a"]
    assert firewall.parse_nft(jumps, "output") == []
    out = jumps.replace("hook input", "hook output")
    assert firewall.parse_nft(out, "output") == ["inet fw a"] and firewall.parse_nft(out) == []
    assert firewall.parse_nft(out.replace("table inet fw", "table inet firewalld"), "output") == []
    assert firewall.parse_nft(jumps.replace("reject", 'accept comment "no drop"')) == []
    assert firewall.parse_nft("") == firewall.parse_nft("Error: Operation not permitted\n") == []


def test_a_port_that_a_run_is_about_to_take_is_not_free(tmp_path: Path) -> None:
    """torchrun needs seconds until it listens; another launch on the same node took the same port meanwhile."""
    run = tmp_path / "runs" / "first"
    plan = {"run": "first", "attempt": 1, "head": "tower", "ranks": [], "nodes": [], "master_port": ports.free_port(29600, 29900)}
    files.write_json(run / "attempts" / "1" / "plan.json", plan)
    port, asked = plan["master_port"], {"workdir": str(tmp_path), "node": "tower", "peers": [], "port": plan["master_port"]}
    low = {"workdir": str(tmp_path), "node": "tower", "low": port}
    assert network.read(asked)["port"]["free"] is True, "nothing of it lives"
    with living(HOMELAB_RUN="first", HOMELAB_NODE="tower", HOMELAB_RUN_DIR=str(run)):
        assert network.read(asked)["port"] == {"free": False, "holder": None, "holder_pid": None, "holder_run": "first"}
        assert ask_node("free-port", low).port > port
        files.write_json(run / "attempts" / "1" / "plan.json", {**plan, "head": "laptop"})
        assert network.read(asked)["port"]["free"] is True, "its head is another node"
        files.write_json(run / "attempts" / "1" / "plan.json", plan)
        files.write_json(run / "attempts" / "1" / "nodes" / "tower" / "exit.json", {"returncode": 1})
        assert network.read(asked)["port"]["free"] is True, "its attempt has ended"
