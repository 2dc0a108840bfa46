"""`homelab bench card` without its node: the program that measures a card, with 16-bit and with 4-bit weights, and its row beside the data sheet's guess."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

from benchmarks.gpu_parts import ranks
from benchmarks.gpu_parts.place import Place


def measure(place: Place) -> None:
    """Each method whose packages are here."""
    for kind in ("lora", "qlora"):
        if kind == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
            place.run(kind, problem="bitsandbytes is not installed here")
            continue
        with place.attempt(kind):
            _one(place, kind)


def _one(place: Place, kind: Any) -> None:
    from homelab.controller.features.bench import card_recipe
    from homelab.controller.planning.speed import measured_cards
    from homelab.controller.planning.speed.measured_cards import MeasuredCard

    recipe = card_recipe.choose(place.device, kind, None, None)
    assert recipe is not None
    row = recipe.row(kind=kind, precision="bf16" if place.is_card else "fp32")
    folder = place.folder / kind
    folder.mkdir()
    (folder / "input.json").write_text(json.dumps({**recipe.request(row, place.device), "measure_s": 30 if place.is_card else 0.1}))
    started = ranks.start(
        ["-m", "homelab.worker.tools.card_speed"],
        folder / "out.txt",
        {"HOMELAB_COLLECTIVE_DIR": str(folder), "RANK": "0", "HOMELAB_NODE": "here"},
    )
    ranks.checked([started], 180)
    (result,) = json.loads((folder / "rank-0.json").read_text())["results"]
    place.run(kind, **result)
    place.figure(f"{kind}_tokens_per_s", result["tokens_per_s"])
    place.figure(f"{kind}_peak_gb", result["peak_bytes"] / 1e9)
    if place.is_card:
        import torch

        told = {key: result[key] for key in ("tokens_per_s", "peak_bytes", "torch")}
        found = MeasuredCard.model_validate({**row, **told, "card": torch.cuda.get_device_name(), "source": "scripts/bench gpu"})
        fault = measured_cards.fault(found)
        place.gate(f"{kind} row can be", fault is None)
        place.run(f"{kind} row", row=found.model_dump(mode="json", exclude_none=True), problem=str(fault) if fault else "")
        if fault is None:
            place.figure(f"{kind}_of_guess", measured_cards.of_guess(found))
