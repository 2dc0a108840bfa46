"""Misconfigurations that let a node sleep, restart or end processes by itself: files of systemd, apt and the kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from homelab.lab.lab import Lab
from scripts.practice.misconfigurations.misconfiguration import add, misconfiguration
from scripts.practice.misconfigurations.node_changes import covered, inside, layered, mounted, own_folder


@contextlib.contextmanager
def run_by_systemd(lab: Lab, node: str, **options: str) -> Iterator[None]:
    """The node looks like one that systemd runs, with these options in the section [Login] of logind.conf."""
    text = "[Login]\n" + "".join(f"{name}={value}\n" for name, value in options.items())
    with layered(lab, node, "/run") as run, layered(lab, node, "/etc/systemd") as configuration:
        (run / "systemd" / "system").mkdir(parents=True, exist_ok=True)
        (configuration / "logind.conf").write_text(text)
        yield


add(
    "idle-suspend", "the node suspends when nobody types", "power.sleep",
    inject=lambda lab, node: run_by_systemd(lab, node, IdleAction="suspend", IdleActionSec="20min"),
)  # fmt: skip
add(
    "processes-killed", "the node ends the processes of a login when the login ends", "power.linger",
    inject=lambda lab, node: run_by_systemd(lab, node, KillUserProcesses="yes", KillExcludeUsers="backup"),
)  # fmt: skip


@misconfiguration("lid", "the node is a laptop that suspends when its lid is closed", "power.sleep")
def lid(lab: Lab, node: str) -> Iterator[None]:
    """systemd's default for a machine with a lid."""
    entry = (
        "I: Bus=0019 Vendor=0000 Product=0005 Version=0000\n"
        'N: Name="Lid Switch"\nP: Phys=PNP0C0D/button/input0\nS: Sysfs=/devices/LNXSYSTM:00/input/input0\n'
        "U: Uniq=\nH: Handlers=event0\nB: PROP=0\nB: EV=21\nB: SW=1\n\n"
    )
    with run_by_systemd(lab, node), covered(lab, node, "/proc/bus/input/devices", entry):
        yield


@contextlib.contextmanager
def power_supplies(lab: Lab, node: str, supplies: Mapping[str, Mapping[str, str]]) -> Iterator[None]:
    """/sys/class/power_supply holds these."""
    with own_folder(lab, node) as folder:
        for name, values in supplies.items():
            (folder / name).mkdir()
            for key, value in values.items():
                (folder / name / key).write_text(value + "\n")
        inside(lab, node, "test", "-d", "/sys/class/power_supply")
        with mounted(lab, node, "/sys/class/power_supply", "--bind", str(folder)):
            yield


_ON_BATTERY = {
    "AC": {"type": "Mains", "online": "0"},
    "BAT0": {"type": "Battery", "scope": "System", "status": "Discharging", "present": "1", "capacity": "64"},
}
add("battery", "the node is a laptop on battery", "power.battery", inject=lambda lab, node: power_supplies(lab, node, _ON_BATTERY))


@misconfiguration("restart-waits", "an upgrade waits for the node's restart", "power.reboot")
def restart_waits(lab: Lab, node: str) -> Iterator[None]:
    """Debian and Ubuntu write a file."""
    with layered(lab, node, "/run") as run:
        (run / "reboot-required").write_text("*** System restart required ***\n")
        (run / "reboot-required.pkgs").write_text("linux-image-6.8.0-88-generic\nlinux-base\n")
        yield


@contextlib.contextmanager
def unattended_upgrades(lab: Lab, node: str, text: str) -> Iterator[None]:
    """The package unattended-upgrades is there and switched on; `text` is the rest of its configuration."""
    with layered(lab, node, "/usr/bin") as programs, layered(lab, node, "/etc/apt/apt.conf.d") as configuration:
        program = programs / "unattended-upgrade"
        program.write_text("#!/bin/sh\nexit 0\n")
        program.chmod(0o755)
        on = 'APT::Periodic::Update-Package-Lists "1";\nAPT::Periodic::Unattended-Upgrade "1";\n'
        (configuration / "20auto-upgrades").write_text(on)
        (configuration / "50unattended-upgrades").write_text(text)
        yield


_RESTARTS = (
    'Unattended-Upgrade::Origins-Pattern {\n        "origin=Debian,codename=${distro_codename},label=Debian";\n};\n'
    'Unattended-Upgrade::Automatic-Reboot "true";\nUnattended-Upgrade::Automatic-Reboot-Time "02:00";\n'
)
add(
    "restarts-itself", "unattended upgrades restart the node at night", "power.updates",
    inject=lambda lab, node: unattended_upgrades(lab, node, _RESTARTS),
)  # fmt: skip


@misconfiguration("driver-upgraded", "unattended upgrades replace the driver of a running card", "power.updates", needs=("card",))
def driver_upgraded(lab: Lab, node: str) -> Iterator[None]:
    """After such an upgrade NVML and the kernel's module are of two versions."""
    status = "Package: nvidia-driver-550\nStatus: install ok installed\nVersion: 550.163.01-0ubuntu0.24.04.1\n\n"
    with unattended_upgrades(lab, node, ""), layered(lab, node, "/var/lib/dpkg") as dpkg:
        file: Path = dpkg / "status"
        file.write_text(status + file.read_text(errors="surrogateescape"), errors="surrogateescape")
        yield
