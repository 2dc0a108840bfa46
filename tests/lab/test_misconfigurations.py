"""Every misconfiguration changes something on its node, and leaves no trace when it is undone."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.checks import registry
from homelab.lab import Lab, faults, procfs
from homelab.lab.tools import call
from scripts.practice.misconfigurations import cables, cards, catalogue, network, node_changes, packages
from scripts.practice.misconfigurations.misconfiguration import NotInjectable, add, node_for
from tests.lab.conftest import needs_namespaces, output

# One of each kind: what all others are made of. (`scripts/bench preflight` injects and undoes every one.)
CHOICE = (
    "ephemeral-in", "docker0", "wifi", "own-name-loopback", "stale-run-on-port", "slow-cable", "mtu", "big-packets-vanish", "long-cable",
    "two-in-one-subnet", "no-power", "cable-pulled", "frozen", "host-key-changed", "host-key-unknown", "key-refused", "no-shell",
    "clock-ahead", "other-peft", "damaged-code", "full-disk", "few-open-files", "memory-limit", "idle-suspend", "battery", "busy-card",
)  # fmt: skip
SHIPPED = f"code/0123456789abcdef/{packages.DAMAGED}"


@pytest.fixture(scope="module")
def lab(isolated: Lab) -> Iterator[Lab]:
    """Two nodes, on which homelab's code lies already."""
    for node in isolated.nodes:
        file = Path(node.workdir, SHIPPED)
        file.parent.mkdir(parents=True)
        file.write_text("one = 1\n")
    yield isolated


@pytest.fixture(scope="module")
def healthy(lab: Lab) -> dict[str, str]:
    """The lab as it was before anything was wrong with it."""
    return everything(lab)


@needs_namespaces
@pytest.mark.namespaces
@pytest.mark.thorough
@pytest.mark.parametrize("name", CHOICE)
def test_it_is_there_and_gone(name: str, lab: Lab, healthy: dict[str, str]) -> None:
    misconfiguration = catalogue.find(name)
    try:
        with catalogue.injected(lab, node_for(misconfiguration, lab), misconfiguration):
            assert changed(everything(lab), healthy)
    except NotInjectable as error:
        pytest.skip(str(error))
    assert changed(everything(lab), healthy) == []


@needs_namespaces
@pytest.mark.namespaces
def test_it_is_undone_when_something_breaks(lab: Lab, healthy: dict[str, str]) -> None:
    for name in ("ephemeral-in", "other-peft", "battery", "long-cable"):
        with pytest.raises(KeyboardInterrupt), catalogue.find(name).inject(lab, "node2"):
            raise KeyboardInterrupt
    assert changed(everything(lab), healthy) == []


@needs_namespaces
@pytest.mark.namespaces
def test_only_the_node_itself_sees_its_layer(lab: Lab) -> None:
    with node_changes.layered(lab, "node2", "/etc/systemd") as folder:
        (folder / "logind.conf").write_text("[Login]\nIdleAction=suspend\n")
        assert output(lab, "node2", "cat /etc/systemd/logind.conf") == "[Login]\nIdleAction=suspend"
        assert "IdleAction=suspend" not in output(lab, "node1", "cat /etc/systemd/logind.conf || true").splitlines()
        assert "\nIdleAction=suspend" not in Path("/etc/systemd/logind.conf").read_text()


@needs_namespaces
@pytest.mark.namespaces
def test_long_cable_takes_its_time_and_loses_nothing(lab: Lab) -> None:
    address = lab.state.node("node2").host
    with cables.relayed(lab, "node2", 0.015):
        # A connect is one round trip: two times through the cable.
        connect = (
            "import socket, time\nfor _ in range(20):\n  t = time.monotonic(); c = socket.create_connection(('%s', 22)); "
            "print(time.monotonic() - t); c.close(); time.sleep(0.02)" % address
        )
        took_s = [float(line) for line in output(lab, "node1", f'python3 -c "{connect}"').split()]
        assert 0.030 <= min(took_s) < 0.060, took_s
        # Large packets, with the sums that a network card would have computed.
        assert len(output(lab, "node2", "head -c 3000000 /dev/zero | tr '\\0' 'a'")) == 3_000_000


@needs_namespaces
@pytest.mark.namespaces
def test_cluster_file_of_a_misconfiguration(lab: Lab) -> None:
    before = lab.cluster_file.read_text()
    with node_changes.cluster_says(lab, "node2", interface='"docker0"', lan_address=None):
        text = lab.cluster_file.read_text()
        first, second = text.split("[[nodes]]")[1:]
        assert 'interface = "docker0"' in second and "lan_address" not in second
        assert 'interface = "eth0"' in first and "lan_address" in first
    assert lab.cluster_file.read_text() == before


def test_unknown_misconfiguration() -> None:
    with pytest.raises(InputError, match=r'no misconfiguration "batery"\. Did you mean "?battery'):
        catalogue.find("batery")


def test_names_are_unique_and_plain() -> None:
    entries = catalogue.all_misconfigurations()
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry.name) for entry in entries)
    assert len({entry.title for entry in entries}) == len(entries)
    assert not {entry.name for entry in entries} & set(faults.FAULTS)
    with pytest.raises(AssertionError):
        add("battery", "once more", "power.battery", inject=cards.healthy)


def test_the_checks_that_find_them_exist() -> None:
    assert {check for entry in catalogue.all_misconfigurations() for check in entry.checks} <= set(registry.IDS)


@pytest.fixture(scope="module")
def shared_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two nodes of the loopback backend, on which homelab's code lies already."""
    with Lab.up(tmp_path_factory.mktemp("shared") / "lab", nodes=2, backend="loopback") as lab:
        for node in lab.nodes:
            file = Path(node.workdir, SHIPPED)
            file.parent.mkdir(parents=True)
            file.write_text("one = 1\n")
        yield lab


def test_loopback_nodes_do_not_have_those_that_need_namespaces(shared_machine: Lab) -> None:
    before = shared_machine.cluster_file.read_text()
    with pytest.raises(NotInjectable, match="loopback"), catalogue.find("battery").inject(shared_machine, "node2"):
        pass
    assert shared_machine.cluster_file.read_text() == before


@pytest.mark.parametrize("name", [entry.name for entry in catalogue.all_misconfigurations() if not entry.namespaces])
def test_the_others_are_there_and_gone_on_loopback(name: str, shared_machine: Lab) -> None:
    before = files_of(shared_machine) | states_of(shared_machine)
    try:
        with catalogue.injected(shared_machine, "node2", catalogue.find(name)):
            assert changed(files_of(shared_machine) | states_of(shared_machine), before)
    except NotInjectable as error:
        pytest.skip(str(error))
    assert changed(files_of(shared_machine) | states_of(shared_machine), before) == []


def everything(lab: Lab) -> dict[str, str]:
    """All that one can change: one entry for each file of the lab, and what the nodes and the switch say of themselves."""
    found = {}
    for node in lab.nodes:
        try:
            enter = node_changes.enter(lab, node.name)
        except Exception:
            found[node.name] = "off"
            continue
        script = (
            "grep -v nsfs /proc/self/mountinfo; ip -o -4 address; ip -o link; tc qdisc; nft list ruleset; cat /proc/meminfo | grep -v kB; "
            "cat /run/reboot-required /etc/hosts 2>&1; ls -l /sys/class/power_supply/ /run/systemd 2>&1"
        )
        found[node.name] = _plain(call(*enter, "sh", "-c", script))
        server = node_changes.sshd_process(lab, node.name)
        found[f"{node.name}: sshd"] = Path(f"/proc/{server}/limits").read_text() + Path(f"/proc/{server}/cgroup").read_text()
        words = [" ".join(procfs.command_line(pid)) for pid in lab.processes_of(node.name)]
        found[f"{node.name}: processes"] = "\n".join(sorted(line for line in words if "pts" not in line and "notty" not in line))
    found["switch"] = _plain(cables.on_switch(lab, "sh", "-c", "ip -o link; tc qdisc; nft list ruleset"))
    return found | states_of(lab) | files_of(lab)


def states_of(lab: Lab) -> dict[str, str]:
    """Power, cable and freezer of every node."""
    return {"status": json.dumps([{key: node.get(key) for key in ("power", "cable", "frozen")} for node in lab.status()["nodes"]])}


def files_of(lab: Lab) -> dict[str, str]:
    """The digests of the lab's files."""
    return {
        str(file.relative_to(lab.folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(lab.folder.rglob("*"))
        if file.is_file() and file.name not in ("sshd.log", "lab.lock", "init.json") and file.stat().st_size < 1 << 20
    }


def _plain(text: str) -> str:
    """Without what changes by itself: numbers of mounts, interfaces and queues, and the kernel's counts."""
    lines = []
    for line in text.splitlines():
        mount = re.match(r"\d+ \d+ \S+ (\S+ \S+) .* - (\S+)", line)
        line = " ".join(mount.groups()) if mount else line
        lines.append(
            re.sub(r"^\d+: |@if\d+|\bqdisc (\w+) [0-9a-f]+:|link-netns\S* \S+|valid_lft \S+|refcnt \d+|link/ether \S+.*", r"\1", line)
        )
    return "\n".join(sorted(lines))


def changed(now: dict[str, str], before: dict[str, str]) -> list[str]:
    """What is not as it was, line by line. A machine that was started again has another number of its boot."""
    lines = []
    for key in sorted(key for key in now.keys() | before.keys() if not key.endswith("/etc/boot_id")):
        old, new = before.get(key, "").splitlines(), now.get(key, "").splitlines()
        lines += [f"{key}: {line}" for line in difflib.ndiff(old, new) if line[0] in "-+"]
    return lines


def test_port_is_the_default_of_recipes() -> None:
    from homelab.shared.recipe import Parallel

    assert Parallel().port == network.PORT
