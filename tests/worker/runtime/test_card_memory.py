"""What a card holds beside torch's memory: measured, kept with the speeds, in the plan's own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from homelab.controller.planning.speed.speed_profiles import SpeedProfile
from homelab.shared.law.speed import Speed
from homelab.shared.protocol import memory_items
from homelab.shared.protocol.memory_items import GRADIENTS
from homelab.worker.balancing.balancer import Report
from homelab.worker.runtime import card_memory
from homelab.worker.runtime.task import Task
from homelab.worker.training import speed_profile
from tests.worker import harness

MIB = 1 << 20


def task(*cards: str, optimizer: str = "adamw", device: str = "cuda") -> Task:
    """A node with these cards, of 8192 MiB, of which others hold 300."""
    items = [{"name": memory_items.HELD, "size_bytes": 300 * MIB}, {"name": GRADIENTS, "size_bytes": 77 * MIB}]
    ranks = [
        {"rank": n, "node": "n", "local_rank": n, "device_name": card, "memory": {"items": items, "available_bytes": 8192 * MIB}}
        for n, card in enumerate(cards)
    ]
    plan = {"ranks": ranks, "device": device, "precision": "bf16"}
    changes: dict[str, Any] = {"method__kind": "lora", "train__optimizer": optimizer, "train__gradient_checkpointing": True}
    return harness.task_of(Path("/w/runs/r"), ["n"] * len(cards), plan=plan, **changes)


def test_it_is_what_neither_others_nor_torch_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2000 * MIB, 7950 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5280 * MIB)
    assert card_memory.beside_torch_bytes(task("A")) == (8192 - 300 - 2000 - 5280) * MIB == 612 * MIB
    assert card_memory.beside_torch_bytes(task("A", optimizer="paged_adamw_8bit")) is None
    assert card_memory.beside_torch_bytes(task("A", device="cpu")) is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2600 * MIB, 7950 * MIB))
    assert card_memory.beside_torch_bytes(task("A")) is None, "others have freed memory: less than a context is no measurement"
    unknown = task("A")
    unknown.plan["ranks"][0]["memory"] = None
    assert card_memory.beside_torch_bytes(unknown) is None


def test_it_is_kept_for_the_cards_of_one_kind() -> None:
    report = Report(Speed(0.1, 0.1, 0.1), 10, 1.0, 1.0, 0.1)
    found: dict[str, Any] | None = speed_profile.content(
        task("A", "B", "A"),
        [report] * 3,
        speed_profile.Measurements(9, [], [], [5, 6], save_s=None, evaluate_s=None, torch_version="2", beside_torch_bytes=612 * MIB),
    )
    assert found
    assert [rank.beside_torch_bytes for rank in SpeedProfile.model_validate(found).ranks] == [612 * MIB, None, 612 * MIB]
