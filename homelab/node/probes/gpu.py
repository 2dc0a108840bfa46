"""The cards: what nvidia-smi says of them, who holds their memory, and what torch can do with them."""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import TYPE_CHECKING

from homelab.node.probes import gpu_answer, holders, nvidia, nvlink
from homelab.node.system import programs
from homelab.shared.protocol import files

if TYPE_CHECKING:
    from typing import Any

    from homelab.shared.protocol.files import JsonObject

_PCI = "/sys/bus/pci/devices"
_PROBE_TIMEOUT_S = 75


def read(request: JsonObject) -> JsonObject:
    """Cards, driver, and torch's own view of them."""
    answer = nvidia.ask()
    path = programs.path_of(nvidia.QUERY[0])
    if path is not None and os.path.dirname(path) not in os.get_exec_path():
        answer["program"] = path
    for card in answer["cards"]:
        card["holders"] = holders.named(card.get("holders", ()))
    if answer["cards"]:
        nvlink.add(answer["cards"])
        answer["torch"] = gpu_answer.answer(request, answer, _PROBE, functools.partial(_gpu_probe, answer["cards"]))
        answer["on_bus"] = None  # not searched where nvidia-smi answers
        _add_capability(answer)
    else:
        answer["torch"] = None
        answer["on_bus"] = on_bus(_PCI)
    return answer


def _add_capability(answer: JsonObject) -> None:
    """nvidia-smi's XML does not tell the compute capability; torch does. Cards are paired by uuid; where torch tells none, by place."""
    cards, devices = answer["cards"], (answer["torch"] or {}).get("devices") or []
    uuids = {card["uuid"] for card in cards if card.get("uuid")}
    if all(device.get("uuid") in uuids for device in devices):
        by_uuid = {device["uuid"]: device for device in devices}
        pairs = [(card, by_uuid.get(card.get("uuid"))) for card in cards]
    else:
        pairs = list(zip(cards, devices)) if len(devices) == len(cards) else []
    for card, device in pairs:
        if device is not None:
            card.setdefault("compute_capability", "{}.{}".format(*device["capability"]))
            if device.get("integrated") and card.get("memory_total_bytes") is None:
                card["shares_memory"] = True


def on_bus(folder: str) -> JsonObject | None:
    """{"cards": NVIDIA cards on the PCI bus, "driver": the kernel driver that has the first of them}; None without a PCI bus."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return None
    cards, driver = 0, None
    for name in names:
        device = os.path.join(folder, name)
        # 0x0300 is a VGA controller, 0x0302 a 3D controller.
        vendor, kind = (files.text(os.path.join(device, key)) for key in ("vendor", "class"))
        if vendor == "0x10de" and kind.startswith("0x03"):
            cards += 1
            bound = os.path.join(device, "driver")
            if driver is None and os.path.islink(bound):
                driver = os.path.basename(os.readlink(bound))
    return {"cards": cards, "driver": driver} if names else None


# Each step has its own guard: a card without kernels fails in the matmul, a bitsandbytes without its library in the import.
_PROBE = """
import json, sys, torch
answer = {"torch": torch.__version__, "cuda_available": torch.cuda.is_available(), "arch_list": [], "devices": []}

def first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0][:300]

def uuid_of(index):
    try:  # a torch before 2.4 does not know it
        uuid = str(torch.cuda.get_device_properties(index).uuid)
    except Exception:
        return None
    return uuid if uuid.startswith("GPU-") else "GPU-" + uuid

def integrated(index):
    try:  # a torch before 2.8 does not know it
        return bool(torch.cuda.get_device_properties(index).is_integrated)
    except Exception:
        return False

def four_bit():
    import bitsandbytes
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float16).to("cuda")
    result = layer(torch.randn(4, 64, device="cuda", dtype=torch.float16))
    return bool(torch.isfinite(result).all())

def eight_bit():
    import bitsandbytes
    layer = bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to("cuda")
    return bool(torch.isfinite(layer.weight.SCB).all())

if answer["cuda_available"]:
    answer["arch_list"] = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        device = {"name": torch.cuda.get_device_name(index), "uuid": uuid_of(index),
                  "capability": list(torch.cuda.get_device_capability(index)), "bf16": False, "integrated": integrated(index),
                  "matmul_ok": False, "error": None, "four_bit_ok": None, "four_bit_error": None,
                  "eight_bit_ok": None, "eight_bit_error": None}
        try:
            with torch.cuda.device(index):
                a = torch.randn(256, 256, device="cuda")
                device["matmul_ok"] = bool(torch.allclose((a @ a).cpu(), a.cpu() @ a.cpu(), atol=1.0))
                device["bf16"] = device["capability"][0] >= 8
        except Exception as error:
            device["error"] = first_line(error)
        for name, layer in (("four_bit", four_bit), ("eight_bit", eight_bit)):
            if name in sys.argv and device["matmul_ok"]:
                try:
                    with torch.cuda.device(index):
                        device[name + "_ok"] = layer()
                except Exception as error:
                    device[name + "_ok"], device[name + "_error"] = False, first_line(error)
        answer["devices"].append(device)
print(json.dumps(answer))
"""


def _gpu_probe(cards: list[JsonObject], layer: str | None) -> Any:
    """torch's own view of the cards: one small matmul on each (a build without kernels for the card fails here, not later).

    The quantised layer (four_bit, eight_bit) is tried where a recipe trains with one: importing bitsandbytes takes seconds.
    """
    words = [sys.executable, "-c", _PROBE] + ([layer] if layer else [])
    try:
        _, output, _ = programs.answer_of(words, _PROBE_TIMEOUT_S, _naming(cards))
        return json.loads(output.strip().splitlines()[-1])
    except (OSError, TimeoutError, ValueError, IndexError):
        return None


def _naming(cards: list[JsonObject]) -> dict[str, str]:
    """The environment in which cuda:0, cuda:1, ... are these cards in this order; it replaces the settings of the login."""
    uuids = [str(card["uuid"]) for card in cards if card.get("uuid")]
    named = {"CUDA_VISIBLE_DEVICES": ",".join(uuids)} if len(uuids) == len(cards) and not any(card.get("mig") for card in cards) else {}
    return dict(os.environ, CUDA_DEVICE_ORDER="PCI_BUS_ID", **named)
