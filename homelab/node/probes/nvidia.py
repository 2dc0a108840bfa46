"""What `nvidia-smi -q -x` says: one call, and everything the checks of a card look at. Drivers since 418 are understood.

Tags come and go with the driver: `clocks_throttle_reasons` became `clocks_event_reasons` in 535, `power_readings` became
`gpu_power_readings` (with `power_draw` as `instant_power_draw`), uncorrected errors were counted together, then as parity and
SECDED, and before Turing as `double_bit`. Since 510 what the driver itself keeps of
a card is `reserved`, and no part of `used`. A tag that is missing, "N/A", "[N/A]", "[Unknown Error]", "[GPU is lost]" or
"Requested functionality has been deprecated" is None: not known.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from homelab.node.system import programs, utilisation

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from homelab.shared.protocol.files import JsonObject

QUERY = ("nvidia-smi", "-q", "-x")
# The question wakes a card without persistence mode. That takes one or two seconds per card, and some machines have eight cards.
TIMEOUT_S = 20.0
_UNKNOWN = ("N/A", "Not Supported", "Not Found", "Unknown", "ERR!", "Insufficient Permissions", "GPU is lost", "GPU requires reset")
_NO_MEMORY = ("N/A", "Not Supported")  # what a card without memory of its own answers
_CUT_OFF = "nvidia-smi -q -x ended in the middle of its answer"
_MOST_LINES, _MOST_LETTERS = 16, 200  # of what it says beside its answer
_TEGRA = "/proc/device-tree/compatible"


def ask(timeout_s: float = TIMEOUT_S) -> JsonObject:
    """The answer as `parse` gives it; "missing" costs no process. Falls back on the CSV question where the XML cannot be read."""
    program = programs.path_of(QUERY[0])
    if program is None:
        return silent("missing")
    try:
        code, output, errors = programs.answer_of((program,) + QUERY[1:], timeout_s)
    except TimeoutError:
        return silent(f"nvidia-smi did not answer within {timeout_s:.0f} s")
    except OSError as error:
        return silent(f"nvidia-smi could not be started: {error}")
    said = _beside(output) + _beside(errors)
    try:
        answer = parse(output)
    except ValueError:
        answer = None
    if code != 0 and not (answer and answer["cards"]):  # with a damaged infoROM it answers, and ends with 14
        return silent("\n".join(said)[:500] or f"nvidia-smi ended with {code}")
    if answer is not None:
        return dict(answer, said=said[:_MOST_LINES])
    state, cards = utilisation.gpus(timeout_s)
    versions = {
        key: _version(match[1])
        for key, match in (("driver_version", _DRIVER.search(output)), ("driver_cuda", _CUDA.search(output)))
        if match
    }
    return dict(silent(state), cards=cards, said=[*said, _CUT_OFF][:_MOST_LINES], **versions)


def silent(state: str) -> JsonObject:
    """The facts where nvidia-smi gives no answer: `state` says why."""
    return {"nvidia_smi": state, "said": [], "driver_version": None, "driver_cuda": None, "cards": []}


def parse(text: str) -> JsonObject:
    """{"nvidia_smi": "ok", "said": [...], "driver_version", "driver_cuda", "cards": [...]} of the XML. Raises ValueError.

    `said` are lines around it: of a card that has fallen off the bus there is one before the XML, and no <gpu> in it.

    `cards` are `homelab.controller.facts.gpu.GpuFacts`; their index is the order in the answer, which is that of nvidia-smi and of the PCI bus.
    """
    start = text.find("<nvidia_smi_log")  # a wrapper or a module system may print something first
    if start < 0:
        raise ValueError("no <nvidia_smi_log>")
    from xml.etree import ElementTree  # the import takes 6 ms, which a node without a card saves

    try:
        log = ElementTree.fromstring(text[start : text.rfind(">") + 1])
    except ElementTree.ParseError as error:
        raise ValueError(f"broken XML: {error}") from None
    return {
        "nvidia_smi": "ok",
        "said": _beside(text)[:_MOST_LINES],
        "driver_version": _version(_text(log, "driver_version")),
        "driver_cuda": _version(_text(log, "cuda_version")),
        "cards": [_card(index, entry) for index, entry in enumerate(log.findall("gpu"))],
    }


_DRIVER = re.compile(r"<driver_version>([^<]*)")
_CUDA = re.compile(r"<cuda_version>([^<]*)")


def _beside(text: str) -> list[str]:
    """The lines before and behind the XML."""
    start, end = text.find("<nvidia_smi_log"), text.rfind("</nvidia_smi_log>")
    around = text if start < 0 else text[:start] + (text[end + len("</nvidia_smi_log>") :] if end > start else "")
    lines = (line.strip()[:_MOST_LETTERS] for line in around.splitlines())
    return [line for line in lines if line and not line.startswith(("<?xml", "<!DOCTYPE"))]


def _version(text: str | None) -> str | None:
    """A version, or None for words in its place ("Not Found" where no CUDA library lies beside the driver)."""
    return text if text and re.fullmatch(r"\d+(\.\d+)*", text.strip()) else None


def _shares_memory(entry: Element) -> bool:
    """Whether the card computes in the machine's memory: it has none of its own, and one address space with the processor, or it is a Jetson's."""
    if (entry.findtext("fb_memory_usage/total") or "").strip().strip("[]") not in _NO_MEMORY:
        return False
    is_one_space = (_text(entry, "addressing_mode") or "").upper() == "ATS"
    is_jetson = "(nvgpu)" in (_text(entry, "product_name") or "") or (os.path.exists(_TEGRA) and "tegra" in _device_tree())
    return is_one_space or is_jetson


def _device_tree() -> str:
    try:
        with open(_TEGRA, encoding="utf-8", errors="replace") as stream:
            return stream.read(4096)
    except OSError:
        return ""


def _card(index: int, entry: Element) -> JsonObject:
    power = _first(entry, "gpu_power_readings", "power_readings")
    link = "pci/pci_gpu_link_info/"
    return {
        "index": index,
        "name": _text(entry, "product_name") or "a card without a name",
        "uuid": _text(entry, "uuid"),
        "bus_id": entry.get("id"),
        "memory_total_bytes": _bytes(entry, "fb_memory_usage/total"),
        "memory_used_bytes": _bytes(entry, "fb_memory_usage/used"),
        "memory_reserved_bytes": _bytes(entry, "fb_memory_usage/reserved"),
        "memory_free_bytes": _bytes(entry, "fb_memory_usage/free"),
        **({"shares_memory": True} if _shares_memory(entry) else {}),
        "temperature_c": _number(entry, "temperature/gpu_temp"),
        "utilization_percent": _number(entry, "utilization/gpu_util"),
        "power_w": _either(power, "power_draw", "instant_power_draw", "average_power_draw"),
        "power_limit_w": _either(power, "current_power_limit", "power_limit", "enforced_power_limit"),
        "power_limit_default_w": _either(power, "default_power_limit"),
        "slowed_by": _slowed_by(entry),
        "pcie_generation": _whole(entry, link + "pcie_gen/max_link_gen"),  # an idle card lowers the current one
        "pcie_width": _whole(entry, link + "link_widths/current_link_width"),
        "pcie_width_max": _whole(entry, link + "link_widths/max_link_width"),
        "compute_mode": _text(entry, "compute_mode"),
        "mig": _yes(entry, "mig_mode/current_mig"),
        "mig_bytes": [_bytes(device, "fb_memory_usage/total") or 0 for device in entry.findall("mig_devices/mig_device")],
        "mig_free_bytes": [_bytes(device, "fb_memory_usage/free") for device in entry.findall("mig_devices/mig_device")],
        "recovery_action": _recovery_action(entry),
        "errors_now": _uncorrected(entry.find("ecc_errors/volatile")),
        "errors_ever": _uncorrected(entry.find("ecc_errors/aggregate")),
        "errors_mended": _repaired(entry),
        "repair_pending": any(
            _yes(entry, path)
            for path in (
                "retired_pages/pending_retirement",
                "retired_pages/pending_blacklist",
                "remapped_rows/remapped_row_pending",
                "ecc_errors/channel_repair_pending",
            )
        ),
        "repair_failed": bool(_yes(entry, "remapped_rows/remapped_row_failure") or _yes(entry, "ecc_errors/unrepairable_memory")),
        "holders": [_holder(process) for process in entry.findall("processes/process_info")],
    }  # fmt: skip


def _slowed_by(entry: Element) -> list[str]:
    """Why the clocks are below the highest just now, without the tags' prefix: "gpu_idle", "hw_thermal_slowdown", ..."""
    reasons = _first(entry, "clocks_event_reasons", "clocks_throttle_reasons")
    return [
        re.sub(r"^clocks_(event|throttle)_reasons?_", "", reason.tag)
        for reason in (reasons if reasons is not None else ())
        if (reason.text or "").strip() == "Active"
    ]


def _recovery_action(entry: Element) -> str | None:
    """What the driver asks for ("Reset", "Reboot", ...), since 565 in one word, before that in two."""
    action = _text(entry, "gpu_recovery_action")
    if action not in (None, "None"):
        return action
    return "Reset" if _yes(entry, "gpu_reset_status/reset_required") else None


def _uncorrected(counts: Element | None) -> int | None:
    """Uncorrected memory errors, for all tags that drivers use; None for a card that does not count them."""
    if counts is None:
        return None
    numbers = [_number(counts, "double_bit/total")]
    numbers += [_number(counts, count.tag) for count in counts if "uncorrectable" in count.tag]
    counted = [int(number) for number in numbers if number is not None]
    return sum(counted) if counted else None


def _repaired(entry: Element) -> int:
    """How many places of the memory were taken out of use because of uncorrected errors."""
    return sum(_whole(entry, path) or 0 for path in ("retired_pages/double_bit_retirement/retired_count", "remapped_rows/remapped_row_unc"))


def _holder(process: Element) -> JsonObject:
    return {
        "pid": _whole(process, "pid"),
        "program": _text(process, "process_name") or "",
        "memory_bytes": _bytes(process, "used_memory"),
        "type": _text(process, "type") or "",
    }


def _first(entry: Element, *tags: str) -> Element | None:
    return next((element for element in map(entry.find, tags) if element is not None), None)


def _text(entry: Element, path: str) -> str | None:
    text = (entry.findtext(path) or "").strip()
    is_unknown = not text or text.strip("[]") in _UNKNOWN
    return None if is_unknown or "Unknown Error" in text or text.startswith("Requested functionality") else text


def _number(entry: Element, path: str) -> float | None:
    """The number before the unit: 8188.0 of "8188 MiB", 16.0 of "16x". None for words in its place, and for more digits than any card has to tell."""
    match = re.match(r"-?\d{1,15}(?!\d)(\.\d+)?", _text(entry, path) or "")
    return float(match.group()) if match else None


def _whole(entry: Element, path: str) -> int | None:
    number = _number(entry, path)
    return None if number is None else int(number)


def _either(entry: Element | None, *paths: str) -> float | None:
    if entry is None:
        return None
    return next((number for number in (_number(entry, path) for path in paths) if number is not None), None)


def _bytes(entry: Element, path: str) -> int | None:
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    number = _number(entry, path)
    unit = (_text(entry, path) or "").rpartition(" ")[2]
    return None if number is None or number < 0 else int(number * units.get(unit, 1 << 20))


def _yes(entry: Element, path: str) -> bool:
    return _text(entry, path) in ("Yes", "Enabled")
