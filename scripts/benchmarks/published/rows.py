"""Rows that others have published: a card, a model, settings, and what they measured; as a cluster and a recipe that `homelab plan` takes."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.published.models import CONFIGS

from homelab.controller.base import hardware
from homelab.controller.base.errors import InputError
from homelab.controller.config.load import parse_cluster
from homelab.controller.config.recipe import parse_recipe
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.model import families
from homelab.controller.planning.speed.measured_cards import ABOVE_PEAK

OWN = Path(__file__).with_name("figures.csv")


@dataclass(frozen=True)
class Row:
    """One published measurement. `memory_gb` and `tokens_per_s` (of all cards together) are None where they were not published.

    `memory_kind`: "allocated" and "reserved" by torch, "process" for all that nvidia-smi counts. `differs`: what the published program does
    otherwise than homelab, and no plan of ours would count.
    """

    source: str
    card: str
    cards: int
    model: str
    recipe: Mapping[str, Any]
    cluster: str
    tokens: int
    memory_gb: float | None
    memory_kind: str
    tokens_per_s: float | None
    differs: str
    note: str

    @property
    def why_untimed(self) -> str:
        """Why its seconds tell nothing of ours; "" where they do."""
        if self.source.startswith("canifinetune"):
            return "a few steps, the cold first one among them"
        if "GPTQ" in self.note:
            return "GPTQ, not NF4"
        if self.recipe["method"].get("base") == "8bit":
            return "computes in 8 bits; homelab makes the weights 16 bits wide first"
        return "DeepSpeed" if self.differs == "DeepSpeed" else ""

    @property
    def name(self) -> str:
        """For a table."""
        return f"{self.source}: {self.model}"

    def inputs(self) -> PlanInputs:
        """What the plan of this row is made from, offline."""
        cluster = parse_cluster(self.cluster, Path("published.toml"))
        return PlanInputs(cluster, parse_recipe(self.recipe), {}, run="published", port=29500, config=CONFIGS.get(self.model.lower()))


def read(path: Path) -> list[Row]:
    """The rows of a CSV file with the columns of `figures.csv`. Raises InputError with file and line."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"the rows cannot be read: {error}", where=str(path), hint=f"name a CSV file with the columns of {OWN}") from error
    rows = []
    for number, line in enumerate(lines, start=2):
        try:
            rows.append(row_of(line))
        except (KeyError, ValueError, TypeError) as error:
            raise InputError(
                f"not a row of figures: {error}", where=f"{path}, line {number}", hint=f"write the columns of {OWN}"
            ) from error
    return rows


def row_of(line: Mapping[str, str]) -> Row:
    """The row of one line of the file, by column. Raises KeyError, ValueError."""
    number = {key: int(line[key]) for key in ("seq_len", "micro_batch", "accumulation", "rank", "cards")}
    model = line["model"]
    if model.lower() not in CONFIGS and families.known(model) is None:
        raise ValueError(f"no config of the model {model} is known")
    targets: Any = line["targets"] if line["targets"] == "all-linear" else line["targets"].split()
    method: dict[str, Any] = {"kind": line["method"]}
    if line["method"] != "full":
        method |= {"rank": number["rank"], "alpha": number["rank"], "targets": targets}
        method |= {"base": line["base"]} if line["method"] == "lora" and line["base"] != "auto" else {}
    batch = number["micro_batch"] * number["accumulation"] * number["cards"]
    recipe = {
        "model": {"name": model}, "data": {"train": "~/published.jsonl"}, "method": method,
        "train": {
            "global_batch": batch, "steps": 100, "learning_rate": 1e-4, "seq_len": number["seq_len"], "optimizer": line["optimizer"], "precision": line["precision"],
            "gradient_checkpointing": line["gradient_checkpointing"] == "True", "fused_loss": line["fused_loss"] == "True",
        },
        "parallel": {"strategy": line["strategy"], "micro_batch": number["micro_batch"], "shares": "equal"},
    }  # fmt: skip
    differs = line["differs_from_homelab"] or ("DeepSpeed" if line["source"] == "QwenLM A100" and line["method"] == "full" else "")
    card = f'{{ model = "{line["card"]}", vram_gb = {float(line["vram_gb"]):g} }}'
    cluster = f'[cluster]\nname = "published"\nnetwork = "192.0.2.0/24"\n[[nodes]]\nname = "box"\nhost = "192.0.2.1"\ngpus = [{", ".join([card] * number["cards"])}]\n'
    return Row(
        line["source"], line["card"], number["cards"], model, recipe, cluster, number["seq_len"] * number["micro_batch"],
        _figure(line["memory_gb"]), line["memory_kind"].rstrip("?"), _possible(_figure(line["tokens_per_s"]), line["card"], number["cards"], model), differs, line["note"],
    )  # fmt: skip


def _figure(text: str) -> float | None:
    if not text:
        return None
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(f"{text} is no figure")
    return value


def _possible(tokens_per_s: float | None, card: str, cards: int, model: str) -> float | None:
    """A published figure contradicts physics where the card's whole peak would not do it: four operations per weight and token (a frozen base)."""
    sheet, config = hardware.lookup(card), CONFIGS.get(model.lower())
    shape = families.from_config(config) if config else families.known(model)
    if (
        tokens_per_s is not None
        and sheet is not None
        and shape is not None
        and tokens_per_s * 4 * shape.active_parameters > cards * sheet.peak_flops * ABOVE_PEAK
    ):
        raise ValueError(f"{tokens_per_s:.0f} tokens/s: no card does that, {card} has {sheet.peak_flops / 1e12:.0f} TFLOPS")
    return tokens_per_s
