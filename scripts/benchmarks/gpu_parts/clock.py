"""Whether the seconds of a pass are this rank's own: a late peer must not change them, and rows must move to the rank that has time."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from benchmarks.gpu_parts import material, ranks
from benchmarks.gpu_parts.place import Place

_LATE_S = 0.3
_SLOW = ("-m", "benchmarks.gpu_parts.watched_peer")


def measure(place: Place) -> None:
    """Two ranks over gloo; rank 1 sleeps between forward and backward of every pass, in the second run twice as long.

    It is late in both: a rank that is never late computes beside the first one all the time, and they share the card.
    """
    shape, steps = ("small", 16) if place.is_card else ("tiny", 4)
    model = material.model(place.folder / "model", shape, device=place.device)
    data = material.rows(place.folder / "rows.jsonl", [200] * 12 * steps)
    late = _LATE_S if place.is_card else 0.05
    with place.attempt("passes beside a late peer"):
        late_s = _passes(place, model, data, steps, "late", late)
        later_s = _passes(place, model, data, steps, "twice as late", 2 * late)
        moved = statistics.median(later_s) / statistics.median(late_s) - 1
        place.figure("late_peer_moves_a_pass", moved)
        if place.is_card:
            place.gate("passes_are_this_ranks_own", abs(moved) <= 0.02)
    with place.attempt("measured shares"):
        _converges(place, model, data, steps, late)


def _passes(place: Place, model: Path, data: Path, steps: int, name: str, sleep_s: float) -> list[float]:
    """Seconds of rank 0's passes, without those of the first steps."""
    run = _run(place, model, data, steps, name, sleep_s, measured=False)
    pass_seconds = json.loads((material.folder_of(run, 0) / "watched.json").read_text())["passes_s"]
    place.run(f"passes, {name}", passes_s=pass_seconds, waited_s=[line["communication_s"] for line in ranks.lines(run, 1, 0)])
    return [seconds for step in pass_seconds[steps // 3 :] for seconds in step]


def _converges(place: Place, model: Path, data: Path, steps: int, sleep_s: float) -> None:
    """With measured shares: the step from which on the late rank's rows stay within one of where they end."""
    run = _run(place, model, data, steps, "measured", sleep_s, measured=True)
    shares = [line["share"] for line in ranks.lines(run, 1, 1)]
    settled = next(step for step in range(len(shares)) if all(abs(share - shares[-1]) <= 1 for share in shares[step:]))
    place.run("shares of the late rank", shares=shares)
    place.figure("shares_settle_after_steps", settled)


def _run(place: Place, model: Path, data: Path, steps: int, name: str, sleep_s: float, *, measured: bool) -> Path:
    run = material.run(place.folder / name, model, data, method__kind="lora", train__steps=steps)
    precision = "bf16" if place.is_card else "fp32"
    material.plan(run, 1, (6, 6), device=place.device, precision=precision, micro_batch=2, measured=measured)
    ranks.checked(ranks.worker(run, 1, 2, {"BENCH_LATE_S": str(sleep_s)}, _SLOW), 100)
    return run
