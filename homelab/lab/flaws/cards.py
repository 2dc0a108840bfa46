"""Flaws of a graphics card that no practice node has: its answers come from a program `nvidia-smi` on the node's PATH.

Only what the driver says can be wrong here. torch sees no card on such a node, and says so itself (`gpu.torch`); what is
found is compared with what is found on a node with a healthy card of this kind.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from homelab.lab.flaws import nvidia_smi
from homelab.lab.flaws.flaw import flaw
from homelab.lab.flaws.inside import cluster_says, running
from homelab.lab.flaws.network import STALE_RUN
from homelab.lab.flaws.packages import cpu_build, cuda_build
from homelab.lab.lab import Lab

DRIVER, CUDA = "580.95.05", "13.0"
BELIEVED = '[{ model = "RTX 3070 Ti", vram_gb = 8 }]'


def program_of(lab: Lab, node: str) -> Path:
    """Where the node's `nvidia-smi` is, if it has one."""
    return lab.state.node_folder(lab.state.node(node)) / "bin" / "nvidia-smi"


@contextlib.contextmanager
def answering(lab: Lab, node: str, **said: Any) -> Iterator[None]:
    """The node's `nvidia-smi` says this (see nvidia_smi.py); the program is made where there is none, and goes again."""
    file = program_of(lab, node)
    answers = file.with_name("nvidia-smi.json")
    before = answers.read_text() if answers.exists() else None
    if before is None:
        file.write_text(f"#!{sys.executable} -IS\n" + Path(nvidia_smi.__file__).read_text())
        file.chmod(0o755)
    answers.write_text(json.dumps({"driver": DRIVER, "cuda": CUDA, "cards": [{}], "refuses": None, **said}))
    try:
        yield
    finally:
        if before is None:
            file.unlink()
            answers.unlink()
        else:
            answers.write_text(before)


@contextlib.contextmanager
def healthy(lab: Lab, node: str) -> Iterator[None]:
    """The node has a card, torch's build is one for it, and cluster.toml knows it: what all flaws of cards start from."""
    with cuda_build(lab, node), answering(lab, node), cluster_says(lab, node, gpus=BELIEVED):
        yield


@flaw("cpu-torch", "the node with the card has torch's build for CPUs", "gpu.torch", card=True)
def cpu_torch(lab: Lab, node: str) -> Iterator[None]:
    """It trains, forty times slower."""
    with cpu_build(lab, node):
        yield


@flaw("another-card", "the node has another card than cluster.toml says", "gpu.inventory", card=True)
def another_card(lab: Lab, node: str) -> Iterator[None]:
    """The cards were exchanged between two machines."""
    card = {
        "name": "NVIDIA GeForce RTX 2060",
        "architecture": "Turing",
        "capability": "7.5",
        "total": 6144,
        "limit": 160.0,
        "default_limit": 160.0,
    }
    with answering(lab, node, cards=[card]):
        yield


@flaw("card-missing", "one of the node's two cards is not seen", "gpu.inventory", card=True)
def card_missing(lab: Lab, node: str) -> Iterator[None]:
    """It fell off the bus, or sits loosely in its slot."""
    with cluster_says(lab, node, gpus=BELIEVED.replace(" }]", ' }, { model = "RTX 3070 Ti", vram_gb = 8 }]')):
        yield


@flaw(
    "unknown-memory",
    "the card does not say how much memory it has",
    "gpu.inventory",
    "gpu.memory",
    "gpu.mig",
    card=True,
)
def unknown_memory(lab: Lab, node: str) -> Iterator[None]:
    """[N/A], as cards that share the processor's memory answer."""
    with answering(lab, node, cards=[{"total": None, "used": None}]):
        yield


@flaw("old-driver", "the card's driver is too old for torch's CUDA", "gpu.driver", "gpu.torch", card=True)
def old_driver(lab: Lab, node: str) -> Iterator[None]:
    """The one of the distribution, from years ago."""
    with answering(lab, node, driver="470.256.02", cuda="11.4"):
        yield


@flaw("no-driver", "the node has no NVIDIA driver", "gpu.driver", card=True)
def no_driver(lab: Lab, node: str) -> Iterator[None]:
    """cluster.toml counts on a card."""
    file = program_of(lab, node)
    away = file.rename(file.with_name("nvidia-smi.away"))
    try:
        yield
    finally:
        away.rename(file)


@flaw("driver-mismatch", "driver and library are of two versions", "gpu.mismatch", card=True)
def driver_mismatch(lab: Lab, node: str) -> Iterator[None]:
    """After an unattended upgrade, until the next restart."""
    said = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.211"
    with answering(lab, node, refuses=[said, 18]):
        yield


@flaw("driver-not-loaded", "the driver's module is not loaded", "gpu.driver", card=True)
def driver_not_loaded(lab: Lab, node: str) -> Iterator[None]:
    """A new kernel, for which no module was built."""
    said = (
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
        "Make sure that the latest NVIDIA driver is installed and running.\n"
    )
    with answering(lab, node, refuses=[said, 9]):
        yield


@flaw("card-lost", "the card has fallen off the bus", "gpu.driver", "gpu.inventory", "gpu.recovery", card=True)
def card_lost(lab: Lab, node: str) -> Iterator[None]:
    """A power supply that is too weak, or a riser."""
    said = "Unable to determine the device handle for GPU0000:01:00.0: GPU is lost.  Reboot the system to recover this GPU\n"
    with answering(lab, node, refuses=[said, 15]):
        yield


@flaw("busy-card", "a program of somebody holds the card's memory", "gpu.memory", card=True)
def busy_card(lab: Lab, node: str) -> Iterator[None]:
    """A chat window that was left open."""
    with _held(lab, node, 6100, {}):
        yield


@flaw("stale-run-on-card", "a forgotten run holds the card's memory", "gpu.memory", "runs.alive", card=True)
def stale_run_on_card(lab: Lab, node: str) -> Iterator[None]:
    """Six of eight gigabytes, and nobody remembers it."""
    with _held(lab, node, 6100, {"HOMELAB_RUN": STALE_RUN, "HOMELAB_NODE": node}):
        yield


@contextlib.contextmanager
def _held(lab: Lab, node: str, mebibytes: int, environment: dict[str, str]) -> Iterator[None]:
    with running(lab, node, "sleep", "86399", environment=environment) as pid:
        process = {"pid": pid, "name": "python", "memory": mebibytes}
        with answering(lab, node, cards=[{"used": mebibytes + 315, "processes": [process]}]):
            yield


@flaw("hot-card", "the card is slowed down by heat", "gpu.throttle", "gpu.temperature", card=True)
def hot_card(lab: Lab, node: str) -> Iterator[None]:
    """Dust, or a fan that stands still."""
    card = {"temperature": 94, "utilization": 99, "reasons": ["hw_slowdown", "hw_thermal_slowdown"]}
    with answering(lab, node, cards=[card]):
        yield


@flaw("hot-idle-card", "the card is hot though it does nothing", "gpu.temperature", card=True)
def hot_idle_card(lab: Lab, node: str) -> Iterator[None]:
    """It will slow down as soon as it works."""
    with answering(lab, node, cards=[{"temperature": 86}]):
        yield


@flaw("one-lane", "the card has one of its sixteen lanes", "gpu.pcie", card=True)
def one_lane(lab: Lab, node: str) -> Iterator[None]:
    """A riser from the days of mining."""
    with answering(lab, node, cards=[{"width": 1}]):
        yield


@flaw("low-power-limit", "the card may use a third of its power", "gpu.power_limit", card=True)
def low_power_limit(lab: Lab, node: str) -> Iterator[None]:
    """Set once against the noise."""
    with answering(lab, node, cards=[{"limit": 100.0}]):
        yield


@flaw("memory-errors", "the card's memory has uncorrected errors", "gpu.ecc", card=True)
def memory_errors(lab: Lab, node: str) -> Iterator[None]:
    """What it computes may be wrong."""
    with answering(lab, node, cards=[{"ecc": "Enabled", "errors": 3}]):
        yield


@flaw("reset-wanted", "the driver wants the card reset", "gpu.recovery", card=True)
def reset_wanted(lab: Lab, node: str) -> Iterator[None]:
    """After an error that it could not get over."""
    with answering(lab, node, cards=[{"action": "Reset"}]):
        yield


@flaw("unexpected-card", "the node has a card, and cluster.toml knows of none", "gpu.inventory")
def unexpected_card(lab: Lab, node: str) -> Iterator[None]:
    """It would train on its processor."""
    with answering(lab, node):
        yield


@flaw("split-card", "the card is in MIG mode", "gpu.mig", card=True)
def split_card(lab: Lab, node: str) -> Iterator[None]:
    """A process would get a part of it, or nothing."""
    card = {
        "name": "NVIDIA A100-SXM4-40GB",
        "capability": "8.0",
        "total": 40960,
        "mig": "Enabled",
        "limit": 400.0,
        "default_limit": 400.0,
    }
    with cluster_says(lab, node, gpus='[{ model = "A100 40GB", vram_gb = 40 }]'), answering(lab, node, cards=[card]):
        yield


@flaw("driver-reports", "the driver reported that the card fell off the bus", "gpu.xid", card=True)
def driver_reports(lab: Lab, node: str) -> Iterator[None]:
    """A line of the kernel's log. (The node's `dmesg` is a stand-in: lines cannot be taken out of the log of this machine.)"""
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    line = f"[{up_s - 60:12.6f}] NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    file = program_of(lab, node).with_name("dmesg")
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{line}\nEND\n")
    file.chmod(0o755)
    try:
        yield
    finally:
        file.unlink()
