"""Misconfigurations of a graphics card that no practice node has: a program `nvidia-smi` on the node's PATH answers for it.

Only the answers of the driver can be wrong here. torch sees no card on such a node, and preflight says so (`gpu.torch`);
compare with the findings on a node with a healthy card of this kind.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from homelab.lab.lab import Lab
from scripts.practice.misconfigurations import nvidia_smi
from scripts.practice.misconfigurations.misconfiguration import Inject, add, misconfiguration
from scripts.practice.misconfigurations.network import STALE_RUN
from scripts.practice.misconfigurations.node_changes import cluster_says, running, says
from scripts.practice.misconfigurations.packages import cpu_build, cuda_build

DRIVER, CUDA = "580.95.05", "13.0"
BELIEVED = '[{ model = "RTX 3070 Ti", vram_gb = 8 }]'


def program_of(lab: Lab, node: str) -> Path:
    """Where the node's `nvidia-smi` is, if it has one."""
    return lab.state.node_folder(lab.state.node(node)) / "bin" / "nvidia-smi"


@contextlib.contextmanager
def answering(lab: Lab, node: str, **changes: Any) -> Iterator[None]:
    """The node's `nvidia-smi` says this (see nvidia_smi.py); where the node has none, it is made and removed again."""
    file = program_of(lab, node)
    answers = file.with_name("nvidia-smi.json")
    before = answers.read_text() if answers.exists() else None
    if before is None:
        file.write_text(f"#!{sys.executable} -IS\n" + Path(nvidia_smi.__file__).read_text())
        file.chmod(0o755)
    answers.write_text(json.dumps({"driver": DRIVER, "cuda": CUDA, "cards": [{}], "refuses": None, **changes}))
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
    """The node has a card, torch's build is one for it, and cluster.toml knows it: the start of all that follows."""
    with cuda_build(lab, node), answering(lab, node), cluster_says(lab, node, gpus=BELIEVED):
        yield


def _said(**changes: Any) -> Inject:
    """The node's `nvidia-smi` gives these answers."""
    return lambda lab, node: answering(lab, node, **changes)


def _card(**answers: Any) -> Inject:
    """The node's one card gives these answers (the keys of nvidia_smi.CARD)."""
    return _said(cards=[answers])


_2060 = {
    "name": "NVIDIA GeForce RTX 2060",
    "architecture": "Turing",
    "capability": "7.5",
    "total": 6144,
    "limit": 160.0,
    "default_limit": 160.0,
}
_A100 = {"name": "NVIDIA A100-SXM4-40GB", "capability": "8.0", "total": 40960, "mig": "Enabled", "limit": 400.0, "default_limit": 400.0}
_HOT = {"temperature": 94, "utilization": 99, "reasons": ["hw_slowdown", "hw_thermal_slowdown"]}
# nvidia-smi's words and exit codes when it cannot answer.
_MISMATCH = ["Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.211", 18]
_NOT_LOADED = [
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n", 9,
]  # fmt: skip
_LOST = ["Unable to determine the device handle for GPU0000:01:00.0: GPU is lost.  Reboot the system to recover this GPU\n", 15]

# name, title, the checks that find it, what is said
ANSWERS: tuple[tuple[str, str, tuple[str, ...], Inject], ...] = (
    ("another-card", "the node has another card than cluster.toml says", ("gpu.inventory",), _card(**_2060)),
    (
        "unknown-memory",
        "the card does not say how much memory it has",
        ("gpu.inventory", "gpu.memory", "gpu.mig"),
        _card(total=None, used=None),
    ),
    ("old-driver", "the card's driver is too old for torch's CUDA", ("gpu.driver", "gpu.torch"), _said(driver="470.256.02", cuda="11.4")),
    ("driver-mismatch", "driver and library are of two versions", ("gpu.mismatch",), _said(refuses=_MISMATCH)),
    ("driver-not-loaded", "the driver's module is not loaded", ("gpu.driver",), _said(refuses=_NOT_LOADED)),
    ("card-lost", "the card has fallen off the bus", ("gpu.driver", "gpu.inventory", "gpu.recovery"), _said(refuses=_LOST)),
    ("hot-card", "the card is slowed down by heat", ("gpu.throttle", "gpu.temperature"), _card(**_HOT)),
    ("hot-idle-card", "the card is hot though it does nothing", ("gpu.temperature",), _card(temperature=86)),
    ("one-lane", "the card has one of its sixteen lanes", ("gpu.pcie",), _card(width=1)),
    ("low-power-limit", "the card may use a third of its power", ("gpu.power_limit",), _card(limit=100.0)),
    ("memory-errors", "the card's memory has uncorrected errors", ("gpu.ecc",), _card(ecc="Enabled", errors=3)),
    ("reset-wanted", "the driver wants the card to be reset", ("gpu.recovery",), _card(action="Reset")),
)
for _name, _title, _checks, _inject in ANSWERS:
    add(_name, _title, *_checks, inject=_inject, needs=("card",))

add("cpu-torch", "the node with the card has torch's build for CPUs", "gpu.torch", inject=cpu_build, needs=("card",))
add(
    "card-missing", "the driver sees one of the node's two cards", "gpu.inventory", needs=("card",),
    inject=says(gpus=BELIEVED.replace(" }]", ' }, { model = "RTX 3070 Ti", vram_gb = 8 }]')),
)  # fmt: skip
add("unexpected-card", "the node has a card, and cluster.toml has none", "gpu.inventory", inject=_said())


@misconfiguration("no-driver", "the node has no NVIDIA driver", "gpu.driver", needs=("card",))
def no_driver(lab: Lab, node: str) -> Iterator[None]:
    """cluster.toml has a card there."""
    file = program_of(lab, node)
    away = file.rename(file.with_name("nvidia-smi.away"))
    try:
        yield
    finally:
        away.rename(file)


@contextlib.contextmanager
def _held(lab: Lab, node: str, mebibytes: int, environment: dict[str, str]) -> Iterator[None]:
    with running(lab, node, "sleep", "86399", environment=environment) as pid:
        process = {"pid": pid, "name": "python", "memory": mebibytes}
        with answering(lab, node, cards=[{"used": mebibytes + 315, "processes": [process]}]):
            yield


add(
    "busy-card",
    "another program holds the card's memory",
    "gpu.memory",
    inject=lambda lab, node: _held(lab, node, 6100, {}),
    needs=("card",),
)
add(
    "stale-run-on-card", "a forgotten run holds the card's memory", "gpu.memory", "runs.alive",
    inject=lambda lab, node: _held(lab, node, 6100, {"HOMELAB_RUN": STALE_RUN, "HOMELAB_NODE": node}), needs=("card",),
)  # fmt: skip


@misconfiguration("split-card", "the card is in MIG mode", "gpu.mig", needs=("card",))
def split_card(lab: Lab, node: str) -> Iterator[None]:
    """A process gets a part of it, or nothing."""
    with cluster_says(lab, node, gpus='[{ model = "A100 40GB", vram_gb = 40 }]'), answering(lab, node, cards=[_A100]):
        yield


@misconfiguration("driver-reports", "the driver reported that the card fell off the bus", "gpu.xid", needs=("card",))
def driver_reports(lab: Lab, node: str) -> Iterator[None]:
    """A line of the kernel's log. The node's `dmesg` is a stand-in, because lines cannot be taken out of this machine's log."""
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    line = f"[{up_s - 60:12.6f}] NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    file = program_of(lab, node).with_name("dmesg")
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{line}\nEND\n")
    file.chmod(0o755)
    try:
        yield
    finally:
        file.unlink()
