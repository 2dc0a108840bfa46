"""Sharded trainings on a card: are they the training of ddp, what do they hold while they load and train, do rows move to who has time, do they resume?

Ranks share one card and meet over NCCL. hsdp has two ranks on each of two nodes. Their groups' limits are too long to wait for; tests hold them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_parts import divided, material, ranks
from benchmarks.gpu_parts.divided import Division
from benchmarks.gpu_parts.place import Place

_LIMIT_S = 60.0
_FP32 = 1e-5
_LATE_S = 0.3
_DDP = Division("ddp", shares=(8, 4))
CASES = (
    Division("zero2", "zero2", (8, 4)), Division("zero3", "zero3", (6, 6)), Division("hsdp", "hsdp", (3, 3, 3, 3), per_node=2),
    Division("zero2 of adapters", "zero2", (8, 4), recipe={"method__kind": "lora"}), Division("zero3 of adapters", "zero3", (6, 6), recipe={"method__kind": "lora"}),
)  # fmt: skip
_ON_CPU = ("zero2", "hsdp")
_MEMORY = ("zero2", "zero3", "hsdp")


def measure(place: Place) -> None:
    """Memory first, which nobody has seen on a card; then the law, which held on one H200; then what takes many steps."""
    if is_too_old():
        place.run("torch", problem="this torch has no reset_iter_state, without which nothing is sharded: 2.13 is the first that has it")
        place.gate("torch_shards", False)
        return
    shape = "small" if place.is_card else "tiny"
    model = material.model(place.folder / "model", shape, "float32", place.device)
    data = material.rows(place.folder / "rows.jsonl", material.lengths(60, 200))
    for name in _MEMORY if place.is_card else ("zero3",):
        with place.attempt(f"memory of {name}"):
            _memory(place, next(case for case in CASES if case.name == name))
    with _told(place, "ddp", _DDP, model, data) as expected:
        for case in CASES:
            if place.is_card or case.name in _ON_CPU:
                with place.attempt(case.name):
                    _agrees(place, case, model, data, expected)
    with place.attempt("resume"):
        _resumes(place, model, data)
    with place.attempt("shares"):
        _shares_move(place, model, data)


def is_too_old() -> bool:
    """Whether torch lacks what every strategy with shards takes of it."""
    import importlib.util

    (folder,) = importlib.util.find_spec("torch.distributed.fsdp._fully_shard").submodule_search_locations or ("",)  # type: ignore[union-attr]
    return "def reset_iter_state" not in (Path(folder) / "_fully_shard.py").read_text(encoding="utf-8")


@contextlib.contextmanager
def _told(place: Place, name: str, of: Division, model: Path, data: Path) -> Iterator[dict[bool, dict[int, float]]]:
    """The losses of ddp, of adapters and without, that the others are held against."""
    expected = {}
    for adapters in (False, True) if place.is_card else (False,):
        with place.attempt(f"{name}{' of adapters' if adapters else ''}"):
            case = dataclasses.replace(of, name=f"{name} {adapters}", recipe={"method__kind": "lora"} if adapters else {})
            run = divided.train(place, case, model, data, "fp32", limit_s=_LIMIT_S)
            expected[adapters] = divided.losses(run)
            material.remove(run, len(case.shares))
    yield expected


def _agrees(place: Place, case: Division, model: Path, data: Path, expected: dict[bool, dict[int, float]]) -> None:
    run = divided.train(place, case, model, data, "fp32", limit_s=_LIMIT_S)
    found, key = divided.losses(run), case.name.replace(" ", "_")
    like = expected[bool(case.recipe)]
    place.run(case.name, losses=found, losses_of_ddp=like)
    place.figure(f"{key}_loss_apart", divided.apart(found, like))
    place.gate(f"{key}_losses_agree", divided.apart(found, like) <= _FP32)
    material.remove(run, len(case.shares))


def _resumes(place: Place, model: Path, data: Path) -> None:
    """From a checkpoint in the middle to the end: the losses of the run that was not ended."""
    case = Division("resume", "zero3", (6, 6), recipe={"method__kind": "lora"})
    run = divided.train(place, case, model, data, "fp32", limit_s=_LIMIT_S, steps=4)
    expected = divided.losses(run)
    divided.begin(place, case, run, "fp32", 2, limit_s=_LIMIT_S, resume_step=2)
    found = divided.losses(run, 2)
    place.run("resume", losses=found, losses_of_the_whole=expected)
    place.figure("resume_loss_apart", divided.apart(found, expected))
    place.gate("a_resumed_run_goes_on", sorted(found) == [3, 4] and divided.apart(found, expected) <= _FP32)
    material.remove(run, 2)


def _memory(place: Place, case: Division) -> None:
    """What the fullest rank reserved while it loaded and at its peak, beside the plan (which holds CUDA's context and NCCL besides)."""
    shape = "small" if place.is_card else "tiny"  # three steps of 1.1B had not ended after 120 s
    model = material.model(place.folder / f"model-{shape}", shape, device=place.device)
    data = material.rows(place.folder / "long.jsonl", [250] * 40)
    precision = "bf16" if place.is_card else "fp32"
    run = divided.train(place, dataclasses.replace(case, name=f"memory of {case.name}"), model, data, precision, limit_s=_LIMIT_S, steps=2)
    size = len(case.shares)
    seen = [divided.watched(run, rank) for rank in range(size)]
    material.remove(run, size)
    load, peak = (max(one[key] for one in seen) for key in ("load_bytes", "peak_bytes"))
    planned = _planned_bytes(case, shape, precision, place.device)
    place.run(f"memory of {case.name}", watched=seen, planned_bytes=planned)
    place.figure(f"{case.name}_load_bytes", load)
    place.figure(f"{case.name}_peak_bytes", peak)
    if planned is not None:
        place.figure(f"{case.name}_planned_bytes", planned)
        if place.is_card:
            place.gate(f"{case.name}_loads_within_its_plan", load <= planned)


def _planned_bytes(case: Division, shape: str, precision: str, device: str) -> int | None:
    """What the planner counts for a rank, without what lies beside torch; None where it cannot be imported."""
    try:
        from homelab.controller.planning.memory import division, rank_memory
        from homelab.controller.planning.model.families import from_config
        from homelab.shared.protocol.memory_items import EXCHANGED, GATHERED
        from homelab.shared.recipe import Method, Train
    except ImportError:
        return None
    architecture = from_config(material.SHAPES[shape])
    assert architecture is not None
    method = Method(kind="full", rank=16, alpha=32, targets="all-linear")
    train = Train(
        global_batch=12, steps=3, learning_rate=1e-3, seq_len=256, gradient_checkpointing=False, fused_loss=False, optimizer="adamw"
    )
    nodes = [material.node_of(rank, case.per_node) for rank in range(len(case.shares))]
    setup = rank_memory.RankSetup(precision, device, case.micro_batch, world_size=len(nodes), division=division.of(case.strategy, nodes))
    counted = (*rank_memory.SEEN_BY_A_DRY_RUN, GATHERED, EXCHANGED)
    return sum(item.size_bytes for item in rank_memory.estimate(architecture, method, train, setup) if item.name in counted)


def _shares_move(place: Place, model: Path, data: Path) -> None:
    """zero2 with a rank that is late in every pass: its rows go to the other one."""
    steps, late_s = (20, _LATE_S) if place.is_card else (8, 0.1)
    many = material.rows(place.folder / "many.jsonl", [150] * 12 * steps)
    case = Division("late", "zero2", (6, 6), measured=True, environment={"BENCH_LATE_S": str(late_s)})
    run = divided.train(place, case, model, many, "bf16" if place.is_card else "fp32", limit_s=2 * _LIMIT_S, steps=steps)
    shares = [line["share"] for line in ranks.lines(run, 1, 1)]
    place.run("shares of the late rank", shares=shares)
    place.figure("last_share_of_the_late_rank", shares[-1])
    place.gate("rows_move_to_the_rank_that_has_time", shares[-1] < 6)
    material.remove(run, 2)
