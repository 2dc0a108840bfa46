"""A program `nvidia-smi` for machines without a card: answers as the real one would for the cards of a JSON file beside it.

Copied into a node's `bin` folder with a `#!` line, so: standard library only, nothing of ours. It knows the plain call, `-L`,
`-q -x` and `--query-gpu=... --format=csv`; everything else is refused in the real program's words.

The JSON: {"driver", "cuda", "cards": [{...}], "refuses": [text, exit code] or null}; a card's keys are those of CARD.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from typing import Any

Answers = dict[str, Any]
Cards = list[Answers]

CARD: Answers = {
    "name": "NVIDIA GeForce RTX 3070 Ti", "architecture": "Ampere", "capability": "8.6", "total": 8192, "used": 315,
    "temperature": 41, "utilization": 0, "watts": 21.37, "limit": 290.0, "default_limit": 290.0, "width": 16, "max_width": 16,
    "reasons": ["gpu_idle"], "mig": "N/A", "ecc": "N/A", "errors": 0, "action": "None", "processes": [],
}  # fmt: skip
RESERVED = 225  # MiB that the driver keeps of a card
REASONS = (
    "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown",
    "sync_boost", "sw_thermal_slowdown", "display_clocks_setting",
)  # fmt: skip


def main() -> int:
    """One answer. Exit codes are the real program's."""
    with open(os.path.abspath(__file__) + ".json") as stream:
        machine = json.load(stream)
    if machine.get("refuses"):
        print(machine["refuses"][0])
        return int(machine["refuses"][1])
    words = sys.argv[1:]
    cards = [dict(CARD, **card) for card in machine["cards"]]
    if not words:
        print(table(machine, cards))
    elif words == ["-L"]:
        for index, card in enumerate(cards):
            print("GPU %d: %s (UUID: %s)" % (index, card["name"], uuid(index)))
    elif sorted(words) == ["-q", "-x"]:
        print(xml(machine, cards))
    elif len(words) == 2 and words[0].startswith("--query-gpu=") and words[1].startswith("--format=csv"):
        return query(machine, cards, words[0].split("=", 1)[1].split(","), words[1].split("=", 1)[1].split(","))
    else:
        print("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n")
        return 1
    return 0


def uuid(index: int) -> str:
    return "GPU-5e1c4d20-8f3a-9a57-2b6e-%012x" % (0x7C21D0A4 + index)


def mebibytes(value: int | None) -> str:
    return "[N/A]" if value is None else "%d MiB" % value


def query(machine: Answers, cards: Cards, fields: list[str], style: list[str]) -> int:
    for index, card in enumerate(cards):
        free = None if card["total"] is None else card["total"] - card["used"] - RESERVED
        value_of = {
            "index": str(index), "name": card["name"], "uuid": uuid(index), "count": str(len(cards)), "driver_version": machine["driver"],
            "memory.total": mebibytes(card["total"]), "memory.used": mebibytes(card["used"]), "memory.free": mebibytes(free),
            "memory.reserved": mebibytes(None if card["total"] is None else RESERVED),
            "temperature.gpu": str(card["temperature"]), "utilization.gpu": "%d %%" % card["utilization"],
            "power.draw": "%.2f W" % card["watts"], "power.limit": "%.2f W" % card["limit"], "compute_cap": card["capability"],
            "pcie.link.width.current": str(card["width"]), "pcie.link.width.max": str(card["max_width"]),
        }  # fmt: skip
        for field in fields:
            if field not in value_of:
                print('Field "%s" is not a valid field to query.\n' % field)
                return 2
        if index == 0 and "noheader" not in style:
            print(", ".join(fields))
        answers = [value_of[field] for field in fields]
        print(", ".join(re.sub(r" (MiB|%|W)$", "", text) for text in answers) if "nounits" in style else ", ".join(answers))
    return 0


def table(machine: Answers, cards: Cards) -> str:
    head = "| NVIDIA-SMI %-20s Driver Version: %-14s CUDA Version: %-8s |" % (machine["driver"], machine["driver"], machine["cuda"])
    line = "+" + "-" * 89 + "+"
    rows = [
        "|   %d  %-40s %6sC %18s / %s |" % (i, c["name"], c["temperature"], mebibytes(c["used"]), mebibytes(c["total"]))
        for i, c in enumerate(cards)
    ]
    return "\n".join([time.strftime("%a %b %e %H:%M:%S %Y"), line, head, line, *rows, line])


def element(name: str, value: Any) -> str:
    """`value`: text, or a list of pairs that are elements themselves."""
    if isinstance(value, list):
        return "<%s>%s</%s>" % (name, "\n".join(element(*pair) for pair in value), name)
    return "<%s>%s</%s>" % (name, str(value).replace("&", "&amp;").replace("<", "&lt;"), name)


def xml(machine: Answers, cards: Cards) -> str:
    head = [("timestamp", time.strftime("%a %b %e %H:%M:%S %Y")), ("driver_version", machine["driver"]), ("cuda_version", machine["cuda"])]
    head.append(("attached_gpus", len(cards)))
    body = "\n".join(element(*pair) for pair in head)
    for index, card in enumerate(cards):
        entries = "\n".join(element(*pair) for pair in card_elements(machine, index, card))
        body += '\n<gpu id="00000000:%02X:00.0">\n%s\n</gpu>' % (index + 1, entries)
    return '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n%s\n</nvidia_smi_log>' % body


def card_elements(machine: Answers, index: int, card: Answers) -> list[tuple[str, Any]]:
    """The elements of one card, in the order and with the names of driver 550."""
    major = int(machine["driver"].split(".")[0])
    family = "clocks_event_reason" if major >= 535 else "clocks_throttle_reason"
    power = "gpu_power_readings" if major >= 525 else "power_readings"
    total, used = card["total"], card["used"]
    memory = [
        ("total", total),
        ("reserved", None if total is None else RESERVED),
        ("used", used),
        ("free", None if total is None else total - used - RESERVED),
    ]
    counts = [(name, card["errors"] if name == "dram_uncorrectable" else 0) for name in (
        "sram_correctable", "sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_correctable", "dram_uncorrectable")]  # fmt: skip
    if card["ecc"] == "N/A":
        counts = [(name, "N/A") for name, _ in counts]
    link: list[tuple[str, Any]] = [
        (
            "pcie_gen",
            [
                ("max_link_gen", 4),
                ("current_link_gen", 1),
                ("device_current_link_gen", 1),
                ("max_device_link_gen", 4),
                ("max_host_link_gen", 4),
            ],
        )
    ]
    link.append(("link_widths", [("max_link_width", "%dx" % card["max_width"]), ("current_link_width", "%dx" % card["width"])]))
    return [
        ("product_name", card["name"]), ("product_brand", "GeForce"), ("product_architecture", card["architecture"]),
        ("display_mode", "Disabled"), ("display_active", "Disabled"), ("persistence_mode", "Disabled"), ("addressing_mode", "None"),
        ("mig_mode", [("current_mig", card["mig"]), ("pending_mig", card["mig"])]), ("mig_devices", "None"),
        ("uuid", uuid(index)), ("minor_number", index), ("vbios_version", "94.02.71.40.A4"), ("multigpu_board", "No"),
        ("gpu_reset_status", [("reset_required", "Yes" if card["action"] == "Reset" else "No"), ("drain_and_reset_recommended", "N/A")]),
        ("pci", [("pci_bus", "%02X" % (index + 1)), ("pci_device", "00"), ("pci_domain", "0000"),
                 ("pci_bus_id", "00000000:%02X:00.0" % (index + 1)), ("pci_gpu_link_info", link)]),
        ("fan_speed", "0 %"), ("performance_state", "P8"),
        (family + "s", [("%s_%s" % (family, name), "Active" if name in card["reasons"] else "Not Active") for name in REASONS]),
        ("fb_memory_usage", [(name, "N/A" if value is None else "%d MiB" % value) for name, value in memory]),
        ("compute_mode", "Default"),
        ("utilization", [("gpu_util", "%d %%" % card["utilization"]), ("memory_util", "0 %")]),
        ("ecc_mode", [("current_ecc", card["ecc"]), ("pending_ecc", card["ecc"])]),
        ("ecc_errors", [("volatile", counts), ("aggregate", counts)]),
        ("temperature", [("gpu_temp", "%d C" % card["temperature"]), ("gpu_temp_max_threshold", "98 C"), ("gpu_temp_slow_threshold", "95 C")]),
        (power, [("power_state", "P8"), ("power_draw", "%.2f W" % card["watts"]), ("current_power_limit", "%.2f W" % card["limit"]),
                 ("requested_power_limit", "%.2f W" % card["limit"]), ("default_power_limit", "%.2f W" % card["default_limit"]),
                 ("min_power_limit", "100.00 W"), ("max_power_limit", "320.00 W")]),
        ("processes", [("process_info", process_elements(process)) for process in card["processes"]]),
    ]  # fmt: skip


def process_elements(process: Answers) -> list[tuple[str, Any]]:
    return [
        ("gpu_instance_id", "N/A"), ("compute_instance_id", "N/A"), ("pid", process["pid"]), ("type", process.get("type", "C")),
        ("process_name", process["name"]), ("used_memory", "%d MiB" % process["memory"]),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
