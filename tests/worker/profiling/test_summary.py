"""What is read out of a trace: calls within calls, modules of the backward pass, exchanges and what overlaps them, memory. Without torch."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.worker.profiling import memory_line, operators, overlap, trace_tree
from homelab.worker.profiling.raw_profile import RawProfile
from homelab.worker.profiling.summarise import summed_up

pytestmark = pytest.mark.timeout(20)

BASE_NS = 1_000_000_000


def call(name: str, begin: float, end: float, cat: str = "cpu_op", tid: int = 1, args: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": begin, "dur": end - begin, "args": args or {}}


def annotation(name: str, begin: float, end: float, tid: int = 1) -> dict[str, Any]:
    return call(name, begin, end, "user_annotation", tid)


def flow(number: int, begin: float, end: float, tid: int = 1) -> list[dict[str, Any]]:
    common = {"cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": 7}
    return [{**common, "ph": "s", "tid": 1, "ts": begin}, {**common, "ph": "f", "tid": tid, "ts": end}]


def step() -> list[dict[str, Any]]:
    """One step of 1000 us: the module `m` multiplies and then idles in Python; its gradient is computed on another thread."""
    return [
        annotation("ProfilerStep#1", 0, 1000), annotation("input", 0, 10), annotation("forward", 10, 310), annotation("module m", 20, 300),
        call("aten::linear", 30, 130), call("aten::mm", 40, 120, args={"External id": 5}), annotation("backward", 310, 900), annotation("optimizer", 900, 990),
        call("MmBackward0", 400, 500, tid=2), call("aten::mm", 410, 490, tid=2, args={"External id": 6}), annotation("gloo:all_reduce", 450, 800, tid=3),
        *flow(1, 40, 400, tid=2),
    ]  # fmt: skip


def raw(**changes: Any) -> RawProfile:
    values: dict[str, Any] = {
        "run": "r", "attempt": 1, "rank": 0, "node": "here", "device": "cpu", "strategy": "ddp", "world_size": 2, "torch": "2", "held_bytes": 1000,
        "usual_step_s": None, "exchanges": [], "modules": {"m": ["Mlp", "model.py:7"]},
        "steps": [{"step": 8, "begin_ns": BASE_NS, "ready_ns": BASE_NS + 500_000, "end_ns": BASE_NS + 1_000_000, "step_s": 1e-3, "communication_s": 0.0}],
    }  # fmt: skip
    return RawProfile(**values | changes)


def test_own_time_phase_and_module() -> None:
    calls = {(one.name, one.thread[1], one.begin_us): one for one in trace_tree.calls(step())}
    assert calls[("aten::linear", 1, 30)].self_us == 20 and calls[("aten::mm", 1, 40)].self_us == 80
    assert calls[("module m", 1, 20)].self_us == 180 and calls[("aten::mm", 1, 40)].phase == "forward"
    assert calls[("aten::mm", 2, 410)].module == "m", "by the forward operator whose gradient it is"
    assert not [key for key in calls if key[0].startswith("gloo:")], "it runs beside everything"


def test_the_dearest_on_a_processor_and_on_a_card() -> None:
    modules = {"m": ("Mlp", "model.py:7")}
    rows = operators.dearest(trace_tree.calls(step()), step(), modules, 1000.0)
    assert [row["name"] for row in rows[:3]] == ["Python of the step's backward", "Python of Mlp", "aten::mm"]
    assert rows[1]["places"] == [{"module": "m", "class": "Mlp", "source": "model.py:7", "share": 1.0}]
    on_card = [
        *step(),
        call("gemm", 50, 650, "kernel", 70, args={"External id": 5}),
        call("gemm", 700, 800, "kernel", 70, args={"External id": 6}),
    ]
    rows = operators.dearest(trace_tree.calls(on_card), on_card, modules, 1000.0)
    assert (rows[0]["name"], rows[0]["device_s"], rows[0]["share"]) == ("aten::mm", pytest.approx(7e-4), pytest.approx(0.7))


def test_a_wait_in_the_backward_pass_is_a_reduction() -> None:
    events = [*step(), call("AccumulateGrad", 480, 520), call("aten::copy_", 850, 860)]
    trace: dict[str, Any] = {"baseTimeNanoseconds": BASE_NS, "traceEvents": events}
    summary = summed_up(trace, raw())
    assert summary["phases"]["reduction"] == pytest.approx((330 + 40) / 1e6), "from its last operator on, without the copy"
    assert summary["phases"]["backward"] == pytest.approx((590 - 370) / 1e6)
    assert sum(summary["phases"].values()) == pytest.approx(1e-3)
    assert "ProfilerStep#8" in {event["name"] for event in trace["traceEvents"]}, "a step has its number of the run"


def entry(name: str, begin: int, end: int, kind: str = "all-reduce", size: int = 100) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "payload_bytes": size,
        "sent_bytes": size / 2,
        "begin_ns": BASE_NS + 1000 * begin,
        "end_ns": BASE_NS + 1000 * end,
    }


def test_overlap_on_a_processor_ends_with_the_last_gradient() -> None:
    steps = [{"begin_ns": BASE_NS, "ready_ns": BASE_NS + 500_000}, {"begin_ns": BASE_NS + 1_000_000, "ready_ns": BASE_NS + 1_500_000}]
    entries = [
        entry("bucket 0", 400, 600),
        entry("bucket 1", 501, 700),
        entry("bucket 0", 1400, 1480),
        entry("gather m", 100, 200, "gather"),
    ]
    rows = {row["name"]: row for row in overlap.table(overlap.placed(entries, steps, [], BASE_NS))}
    assert (rows["bucket 0"]["calls"], rows["bucket 0"]["sent_bytes"]) == (2, 100)
    assert rows["bucket 0"]["overlap_s"] == pytest.approx(180e-6) and rows["bucket 0"]["seconds"] == pytest.approx(280e-6)
    assert rows["bucket 1"]["overlap_s"] == 0, "it begins when all is computed, and the next step's gradient is not its own"
    assert rows["gather m"]["overlap_s"] == 0


def test_overlap_on_a_card_is_that_of_the_kernels() -> None:
    events = [
        call("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 100, 300, "kernel", 20), call("gemm", 150, 200, "kernel", 7), call("gemm", 190, 250, "kernel", 8),
        call("gemm", 290, 400, "kernel", 7),
    ]  # fmt: skip
    (one,) = overlap.placed([entry("bucket 0", 90, 95)], [], events, BASE_NS)
    assert (one.begin_us, one.end_us, one.overlap_us) == (100, 300, 110)


def test_a_kernel_that_nobody_noted_moves_no_other() -> None:
    """hsdp sums between machines; with all NCCL's kernels counted together every time was that of the call."""
    names = (
        "ncclDevKernel_AllGather_RING_LL",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
        "ncclDevKernel_AllGather_RING_LL",
    )
    events = [call(name, 100 * number, 100 * number + 50, "kernel", 20) for number, name in enumerate(names, start=1)]
    noted = [entry("gather a", 1, 2, "gather"), entry("gather b", 3, 4, "gather"), entry("scatter a", 5, 6, "scatter")]
    assert [(one.name, one.begin_us) for one in overlap.placed(noted, [], events, BASE_NS)] == [
        ("gather a", 100),
        ("gather b", 400),
        ("scatter a", 300),
    ]
    (alone,) = overlap.placed([entry("bucket 0", 7, 8)], [], events + [call(names[1], 900, 950, "kernel", 20)], BASE_NS)
    assert (alone.begin_us, alone.end_us) == (7, 8), "two kernels of one call: which is its own is not known"


def test_memory_over_time() -> None:
    def change(at: float, total: int, kind: int = 0) -> dict[str, Any]:
        return {"ph": "i", "name": "[memory]", "ts": at, "args": {"Total Allocated": total, "Device Type": kind}}

    events = [change(5, 100), change(120, 900), change(200, 50), change(50, 7000, kind=1)]
    calls = trace_tree.calls(step())
    line = memory_line.line(events, calls, 1000, on_card=False, from_us=0.0)
    assert line["points"] == [[5e-6, 1100], [1.2e-4, 1900], [2e-4, 1050]] and (line["peak_bytes"], line["peak_phase"]) == (1900, "forward")
    assert memory_line.line(events, calls, 1000, on_card=True, from_us=0.0)["peak_bytes"] == 7000
    many = memory_line.line([change(at, at) for at in range(5000)], [], 0, on_card=False, from_us=0.0)
    assert len(many["points"]) <= memory_line.MOST_POINTS and max(size for _, size in many["points"]) == many["peak_bytes"] == 4999
    assert memory_line.line([], [], 0, on_card=False, from_us=0.0)["peak_bytes"] is None
