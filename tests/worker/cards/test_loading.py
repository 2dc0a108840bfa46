"""Where the base model is read to, on nodes with cards: a card of a divided model never has all of it. Without a card: what transformers is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

from homelab.worker.model import build, pretrained, quantised_cache
from homelab.worker.strategies.registry import strategy_of
from homelab.worker.strategies.sharded.shards import Shards
from tests.worker import harness
from tests.worker.model import odd_models

CARD, HOST = {"": 0}, None
CASES = {
    "ddp": ("ddp", "lora", CARD), "zero2": ("zero2", "lora", CARD), "zero2, all weights": ("zero2", "full", CARD), "zero3": ("zero3", "lora", HOST),
    "fsdp": ("fsdp", "full", HOST), "hsdp": ("hsdp", "lora", HOST), "zero3, quantised": ("zero3", "qlora", CARD),
}  # fmt: skip


class Told(Exception):
    """What `from_pretrained` was told."""


def device_map(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, kind: str) -> Any:
    """The device_map with which the base model of rank 0 of two is loaded."""
    task = harness.task_of(
        folder,
        ("here", "here"),
        plan={"device": "cuda", "precision": "bf16", "strategy": strategy},
        method__kind=kind,
        model__name=str(model),
    )

    def from_pretrained(_class: Any, path: str, **options: Any) -> Any:
        raise Told(options.get("device_map"))

    monkeypatch.setattr(build, "from_pretrained", from_pretrained)
    monkeypatch.setattr(quantised_cache, "folder_of", lambda *_: None)
    with pytest.raises(Told) as told:
        build._load_base(task, str(model), lambda note: None, strategy_of(task, 1).part)
    return told.value.args[0]


@pytest.mark.parametrize("case", CASES)
def test_a_card_is_not_given_a_model_that_will_be_divided(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    strategy, kind, wanted = CASES[case]
    assert device_map(tmp_path, model, monkeypatch, strategy, kind) == wanted


def test_files_that_are_quantised_already_go_to_the_card(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = odd_models.quantised(model, tmp_path / "held", 4)
    assert device_map(tmp_path, held, monkeypatch, "zero3", "lora") == CARD


@pytest.mark.parametrize(("strategy", "kind", "stays"), [("zero3", "lora", True), ("zero2", "lora", False), ("zero3", "qlora", False)])
def test_who_divides_moves_what_lies_on_the_host(tmp_path: Path, model: Path, strategy: str, kind: str, stays: bool) -> None:
    """As `build` decides where it is read to."""
    task = harness.task_of(tmp_path, ("here", "here"), plan={"strategy": strategy}, method__kind=kind)
    loaded = build.load_base(str(model), None, task.method.quantisation, pretrained.DTYPES["fp32"], None, "here")
    assert Shards(task).divides_on_host(loaded) is stays
