"""fp16: an overflow on one rank alone. All ranks must skip that step, and the scale must be the same on all and after a resume."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu_parts import material, ranks
from benchmarks.gpu_parts.place import Place

_SCALED = ("-m", "benchmarks.gpu_parts.fp16_peer")


def measure(place: Place) -> None:
    """Two ranks over gloo; rank 1 multiplies one gradient until it is infinite, in the third step."""
    steps = 8 if place.is_card else 4
    model = material.model(place.folder / "model", "small" if place.is_card else "tiny", "float32", place.device)
    data = material.rows(place.folder / "rows.jsonl", material.lengths(12 * steps, 250))
    run = material.run(place.folder / "run", model, data, method__kind="lora", train__steps=steps, checkpoint__every_steps=steps // 2)
    material.plan(run, 1, (8, 4), device=place.device, precision="fp16")
    ranks.checked(ranks.worker(run, 1, 2, {"BENCH_OVERFLOW_STEP": "3"}, _SCALED), 100)
    lines = [ranks.lines(run, 1, rank) for rank in (0, 1)]
    skipped = [[line["step"] for line in own if line["grad_norm"] is None] for own in lines]
    rates = [[line["learning_rate"] for line in own] for own in lines]
    scales = [_scales(material.folder_of(run, rank)) for rank in (0, 1)]
    place.run(
        "overflow on rank 1", skipped=skipped, learning_rates=rates, scales=scales, losses=[[line["loss"] for line in own] for own in lines]
    )
    material.plan(run, 2, (8, 4), device=place.device, precision="fp16", resume_step=steps // 2)
    ranks.checked(ranks.worker(run, 2, 2, {"BENCH_OVERFLOW_STEP": "0"}, _SCALED), 100)
    resumed = [_scales(material.folder_of(run, rank)) for rank in (0, 1)]
    place.run("resumed", scales=resumed)
    place.gate("all_skip_the_same_steps", skipped[0] == skipped[1] and 3 in skipped[0])
    place.gate("the_scale_is_one", scales[0] == scales[1] and resumed[0] == resumed[1])
    place.gate("the_schedule_waits_alike", rates[0] == rates[1])
    place.gate("the_resume_keeps_the_scale", resumed[0][:1] == scales[0][steps // 2 - 1 : steps // 2])


def _scales(folder: Path) -> list[float]:
    return [float(line) for line in (folder / "scales.txt").read_text().split()]
