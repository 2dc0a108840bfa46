"""AMD cards. Training needs CUDA, so they are only listed: their owner learns before the launch that they cannot train."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from homelab.node.system import programs
from homelab.shared.protocol import files

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject

# The graphics unit of a Ryzen processor is a "card" too. Its memory is a part of the machine's memory, 0.5 to 2 GiB.
CARD_BYTES = 3 << 30
_AMD = "0x1002"
_TIMEOUT_S = 5.0
_ROCM_SMI = ("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json")
_AMD_SMI = ("amd-smi", "static", "--asic", "--vram", "--json")


def read(request: JsonObject) -> list[JsonObject]:
    """Names and memory. A node without an AMD card pays for a look at /sys; names come from ROCm's programs where they are."""
    cards = _of_kernel("/sys/class/drm")
    if not cards:
        return []
    for words, parse in ((_ROCM_SMI, parse_rocm_smi), (_AMD_SMI, parse_amd_smi)):
        if programs.path_of(words[0]):
            try:
                code, output, _ = programs.answer_of(words, _TIMEOUT_S)
                named = parse(output) if code == 0 else []
            except (OSError, TimeoutError, ValueError):
                continue
            if named:
                return [card for card in named if (card["memory_total_bytes"] or CARD_BYTES) >= CARD_BYTES]
    return cards


def _of_kernel(folder: str) -> list[JsonObject]:
    """The cards of the amdgpu driver, without a name where the card has none of its own (only some carry one)."""
    cards = []
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith("card") and name[4:].isdigit())
    except OSError:
        return []
    for name in names:
        device = os.path.join(folder, name, "device")
        if files.text(os.path.join(device, "vendor")) != _AMD:
            continue
        memory = files.text(os.path.join(device, "mem_info_vram_total"))
        size = int(memory) if memory.isdigit() else None
        if size is not None and size >= CARD_BYTES:
            name = files.text(os.path.join(device, "product_name")) or "AMD card"
            cards.append({"name": name, "memory_total_bytes": size})
    return cards


def parse_rocm_smi(text: str) -> list[JsonObject]:
    """Cards of `rocm-smi --showproductname --showmeminfo vram --json` (ROCm 5.x "Card series", 6.x "Card Series"). Raises ValueError."""
    cards = []
    for key, entry in sorted(json.loads(text[max(text.find("{"), 0) :]).items()):
        if not key.startswith("card") or not isinstance(entry, dict):
            continue
        fields = {name.lower(): value for name, value in entry.items()}
        size = str(fields.get("vram total memory (b)", ""))
        name = fields.get("card series") or fields.get("card model") or "AMD card"
        cards.append({"name": str(name), "memory_total_bytes": int(size) if size.isdigit() else None})
    return cards


def parse_amd_smi(text: str) -> list[JsonObject]:
    """Cards of `amd-smi static --asic --vram --json` (ROCm 6.x: a list; since 7 below "gpu_data"). Raises ValueError."""
    answer = json.loads(text)
    cards = []
    for entry in answer.get("gpu_data", []) if isinstance(answer, dict) else answer:
        name = (entry.get("asic") or {}).get("market_name")
        size = ((entry.get("vram") or {}).get("size")) or {}
        value = size.get("value") if isinstance(size, dict) else None
        # The unit is called MB, the number counts MiB.
        total = value << 20 if isinstance(value, int) else None
        cards.append({"name": str(name or "AMD card"), "memory_total_bytes": total})
    return cards
