"""Smaller gradients on the wire: real ranks over gloo, the bytes that the hook sends, and a curve close to the uncompressed one."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from homelab.shared.law import wire_bytes
from homelab.worker.strategies.ddp import gradient_compression
from tests.worker import harness

STEPS = 12
HIDDEN, INTERMEDIATE, LAYERS = 128, 256, 3  # 2 MB of gradient: more than one of DDP's buckets, whose first holds 1 MiB
Trained = Callable[[str], Path]


@pytest.fixture(scope="module")
def trained(forks: harness.Forks, tmp_path_factory: pytest.TempPathFactory, data: Path) -> Trained:
    """The run of two ranks by its `compress`; rank 0 has eleven of twelve rows, and rank 1 waits for it."""
    root = tmp_path_factory.mktemp("compressed")
    model = harness.tiny_llama(root / "model", hidden=HIDDEN, intermediate=INTERMEDIATE, layers=LAYERS)
    found: dict[str, Path] = {}

    def train(name: str) -> Path:
        if name not in found:
            recipe: dict[str, Any] = {"train__steps": STEPS, "train__epochs": None, "parallel__compress": name, "parallel__micro_batch": 1}
            found[name] = harness.make_run(root / name, model, data, **recipe, checkpoint__every_steps=6)
            forks.train(found[name], 1, [11, 1], micro_batch=1)
        return found[name]

    return train


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "loss_apart"), [pytest.param("bf16", 1e-4, marks=pytest.mark.thorough), ("powersgd", 1e-2)]
)  # measured: 2e-6 and 3e-3
def test_a_compressed_run_trains_like_an_uncompressed_one(trained: Trained, name: str, loss_apart: float) -> None:
    run, plain = trained(name), trained("none")
    found, expected = harness.losses(run, 1), harness.losses(plain, 1)
    assert found == pytest.approx(expected, rel=loss_apart)
    assert found != pytest.approx(expected, rel=1e-7), "nothing was compressed"
    assert found[STEPS] < 0.8 * found[1], "it learns"
    for rank in (0, 1):
        assert harness.losses(run, 1, rank) == found
    notes = [line["message"] for line in harness.lines(run, 1, 0, "metrics.jsonl", "note")]
    assert not any("differ" in note for note in notes), "both ranks hold the same weights"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_bytes_on_the_wire(trained: Trained) -> None:
    shapes = [tuple(tensor.shape) for tensor in harness.weights(trained("none"), STEPS).values()]
    elements = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes)
    narrow = sum(wire_bytes.powersgd_elements(*shape) if len(shape) > 1 else shape[0] for shape in shapes)
    assert narrow < elements / 10
    for rank in (0, 1):
        assert sent(trained("none"), 1, rank) == [4 * elements] * STEPS
        assert sent(trained("bf16"), 1, rank) == [2 * elements] * STEPS, "half"
        assert sent(trained("powersgd"), 1, rank) == [4 * elements] * 2 + [4 * narrow] * (STEPS - 2)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["none", "bf16", "powersgd"])
def test_waiting_is_told_from_computing(trained: Trained, name: str) -> None:
    """Rank 1 has one row of twelve: what it waits for the other is communication, whatever goes over the wire."""
    busy, waiting = (median_communication_share(trained(name), rank) for rank in (0, 1))
    assert busy < 0.4, "eleven passes, and little to wait for"
    assert waiting > 0.6, "one pass, and the time of ten others to wait for"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_powersgd_goes_on_after_a_resume(forks: harness.Forks, trained: Trained) -> None:
    """On three ranks, whole for two steps again: the products of the first attempt are gone."""
    run = trained("powersgd")
    forks.train(run, 2, [4, 4, 4], resume_step=6)
    before = harness.losses(run, 1)
    assert harness.losses(run, 2) == pytest.approx({step: before[step] for step in range(7, STEPS + 1)}, rel=1e-2)
    whole, narrow = sent(run, 1, 0)[0], sent(run, 1, 0)[-1]
    assert sent(run, 2, 0) == [whole] * 2 + [narrow] * (STEPS - 8)


def median_communication_share(run: Path, rank: int) -> float:
    """Of the time that is told apart; by the median step, since a busy machine may stop either rank in a single one."""
    steps = harness.lines(run, 1, rank, "metrics.jsonl", "train")[3:]
    return statistics.median(line["communication_s"] / (line["communication_s"] + line["compute_s"]) for line in steps)


def sent(run: Path, attempt: int, rank: int) -> list[int]:
    return [line["sent_bytes"] for line in harness.lines(run, attempt, rank, "metrics.jsonl", "train")]


@pytest.mark.parametrize(("backend", "begun"), [("nccl", [1]), ("gloo", [])])
def test_powersgd_waits_for_all_buckets_where_gloo_would_mix_them_up(
    monkeypatch: pytest.MonkeyPatch, backend: str, begun: list[int]
) -> None:
    """Wherever the gradients are: ranks that share one card talk over gloo, too."""
    import torch
    import torch.distributed as dist

    class Bucket:
        def __init__(self, number: int, *, last: bool) -> None:
            self.number, self.last = number, last

        def is_last(self) -> bool:
            return self.last

        def buffer(self) -> torch.Tensor:
            return torch.zeros(1)

    reduced: list[int] = []

    def one(bucket: Bucket) -> torch.futures.Future[int]:
        reduced.append(bucket.number)
        done: torch.futures.Future[int] = torch.futures.Future()
        done.set_result(bucket.number)
        return done

    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    reduction = gradient_compression.PowerSgd(2)
    monkeypatch.setattr(reduction, "_one", one)
    first = reduction._reduce(Bucket(1, last=False))
    assert reduced == begun
    last = reduction._reduce(Bucket(2, last=True))
    assert reduced == [1, 2] and (first.wait(), last.wait()) == (1, 2)
