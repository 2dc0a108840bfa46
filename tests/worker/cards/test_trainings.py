"""Whole trainings by the rules of NCCL and of a card, with every strategy: no rank waits for ever, and what a rank measures of itself is its own work.

Each has the agreement on rows, the comparison of weights, held-out rows before, in and after the training, clipped gradients, checkpoints in
the background, the best weights, and where shares follow the speeds a recut in its middle.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from homelab.shared.law.pipeline_schedule import least_in_flight, most_in_flight
from homelab.shared.law.speed import Speed
from tests.worker.cards.model import BACKWARD, FORWARD
from tests.worker.cards.nccl import Rules
from tests.worker.cards.training import OPTIMIZER_S, ROW_TOKENS, Training, play

pytestmark = pytest.mark.timeout(120)
PASS_TOKENS = 2 * ROW_TOKENS
FAST, SLOW = Speed(0.0, 0.1, 0.01), Speed(0.0, 0.2, 0.02)
SAVING = (("train__keep_best", True), ("tracking__eval_every_steps", 2))
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"}, "bf16": {"strategy": "ddp", "changes": (("parallel__compress", "bf16"),)},
    "powersgd": {"strategy": "ddp", "changes": (("parallel__compress", "powersgd"),)},
    "zero2": {"strategy": "zero2"}, "zero2 in bf16": {"strategy": "zero2", "precision": "bf16"},
    "zero3": {"strategy": "zero3"}, "hsdp": {"strategy": "hsdp", "machines": 2}, "pipeline": {"strategy": "pipeline"},
    "pipeline, least in flight": {"strategy": "pipeline"}, "pipeline with a shared table": {"strategy": "pipeline", "is_tied": True},
}  # fmt: skip


def training(kind: str, cards: list[Speed], **more: Any) -> Training:
    options = {**KINDS[kind], **more}
    if kind.startswith("pipeline"):
        kept = least_in_flight if "least" in kind else most_in_flight
        options["in_flight"] = [kept(stage, len(cards)) for stage in range(len(cards))]
    return Training(cards=cards, **{**options, "changes": (*SAVING, *KINDS[kind].get("changes", ()))})


def unequal(size: int) -> list[Speed]:
    return [FAST if rank % 2 == 0 else SLOW for rank in range(size)]


def sizes(kind: str) -> tuple[int, ...]:
    """Numbers of ranks; hsdp: two machines of two or three cards."""
    return (4, 6) if kind == "hsdp" else (2, 3, 4, 5)


ALL = [(kind, size) for kind in KINDS for size in sizes(kind)]
SOME = [pytest.param(kind, size, marks=() if size in (2, 4) else pytest.mark.thorough) for kind, size in ALL]


@pytest.mark.parametrize(("kind", "size"), SOME)
def test_no_rank_waits_for_ever(tmp_path: Path, kind: str, size: int) -> None:
    """The allocator of one card gives memory back in the middle of a step."""
    rules = Rules(message_s=0.05, retries_at=(size - 1, (FORWARD, BACKWARD)[size % 2], 20))
    assert not play(training(kind, unequal(size), steps=4), tmp_path, rules).deadlock


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "size"), ALL)
def test_no_rank_waits_for_ever_whichever_card_is_full(tmp_path: Path, kind: str, size: int) -> None:
    for number, (rank, kernel, launch) in enumerate(itertools.product(range(size), (FORWARD, BACKWARD), (7, 30))):
        rules = Rules(message_s=0.05, retries_at=(rank, kernel, launch))
        assert not play(training(kind, unequal(size), steps=4), tmp_path / str(number), rules).deadlock


MEASURED = [kind for kind in KINDS if kind not in ("zero3", "hsdp")]


@pytest.mark.parametrize("kind", MEASURED)
def test_what_is_measured_is_the_own_work(tmp_path: Path, kind: str) -> None:
    """Within 3 %, in every step of every rank, and in the speeds that are kept for the next plan; slow wires and slower ranks are no part of it."""
    cards = unequal(3)
    played = play(training(kind, cards, steps=6), tmp_path, Rules(message_s=0.3))
    assert not played.deadlock
    assert played.error < 0.03
    for rank, card in enumerate(cards):
        (kept,) = json.loads(speeds(tmp_path, rank).read_text())["ranks"]
        assert kept["step_s"] <= OPTIMIZER_S * 1.03
        work = kept["micro_batch_s"] + kept["token_s"] * PASS_TOKENS
        assert work == pytest.approx(card.pass_s(PASS_TOKENS) * (3 if kind.startswith("pipeline") else 1), rel=0.03)


@pytest.mark.parametrize("kind", ["zero3", "hsdp"])
def test_passes_that_wait_in_their_middle_keep_no_speed(tmp_path: Path, kind: str) -> None:
    """Their seconds are those of the slowest rank and of the wire."""
    played = play(training(kind, unequal(4), steps=6), tmp_path, Rules(message_s=0.3))
    assert not played.deadlock
    assert played.error > 0.5
    assert not any(speeds(tmp_path, rank).exists() for rank in range(2))
    assert len({tuple(mine) for mine in played.rows}) == 1


@pytest.mark.parametrize("kind", ["ddp", "bf16", "zero2", "zero2 in bf16"])
def test_shares_find_unequal_cards(tmp_path: Path, kind: str) -> None:
    """Cards of 2 to 1 that begin with 6 rows each end with 8 and 4."""
    played = play(training(kind, [FAST, SLOW], steps=6), tmp_path, Rules(message_s=0.3))
    assert not played.deadlock
    assert [mine[0] for mine in played.rows] == [6, 6]
    assert [mine[-1] for mine in played.rows] == [8, 4]


def speeds(folder: Path, rank: int) -> Path:
    """Where a node keeps what it has measured."""
    (path,) = (folder / f"node{rank}" / "speeds").glob("*") if (folder / f"node{rank}" / "speeds").exists() else (folder / "none",)
    return path
