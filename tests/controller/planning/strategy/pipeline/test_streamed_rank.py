"""Layers without room on a card come from its host: first resident, then streamed, then refused."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from homelab.controller.planning.machines import host_room
from homelab.controller.planning.memory.scenario import DoesNotFit
from homelab.controller.planning.memory_estimate import MemoryEstimate, StreamingPlan
from homelab.controller.planning.plan import make
from homelab.controller.planning.render import plan_table
from homelab.controller.planning.strategy import registry
from homelab.controller.planning.strategy.pipeline import streamed_rank
from homelab.controller.planning.types import Plan
from homelab.controller.planning.work import job
from tests import builders
from tests.builders import NAMES

GB = 10**9
LLAMA_8B, LLAMA_70B = "meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-70B"


def plan_of(
    cards_gb: list[float], model: str, *, host_gb: float | None = None, disk_gb: float = 0.0, turns: bool = False, wsl: bool = False,
    link: tuple[int, int] | None = None, **tables: Any,
) -> Plan:  # fmt: skip
    """Offline, or with so much free memory and room on its disk on every host, and cards on such a link: (generation, lanes)."""
    names = NAMES[: len(cards_gb)]
    nodes = {name: {"gpus": [{"model": "RTX 4090", "vram_gb": size}]} for name, size in zip(names, cards_gb, strict=True)}
    recipe = builders.recipe(
        model={"name": model}, method={"kind": "qlora", **tables.pop("method", {})}, **tables,
        train={"global_batch": 16, "learning_rate": 1e-4, "steps": 10, "seq_len": 1024},
    )  # fmt: skip
    inputs = builders.plan_inputs(builders.cluster(names, nodes=nodes), recipe, {})
    if host_gb is not None:
        facts = {}
        for name, size in zip(names, cards_gb, strict=True):
            card = {
                "index": 0,
                "name": "NVIDIA GeForce RTX 4090",
                "memory_total_bytes": int(size * 2**30),
                "memory_used_bytes": 0,
                "compute_capability": "8.9",
                **({"pcie_generation": link[0], "pcie_width": link[1], "pcie_width_max": 16} if link else {}),
            }
            memory = {"memory_total_bytes": int(2 * host_gb * GB), "memory_available_bytes": int(host_gb * GB)}
            gpu = {"nvidia_smi": "ok", "driver_version": "580.95.05", "driver_cuda": "13.0", "cards": [card]}
            disk = {"disk_free_bytes": int(disk_gb * GB), "disk_turns": turns}
            parts: dict[str, Any] = {"system": memory, "gpu": gpu, "resources": disk, **({"network": {"wsl": "nat"}} if wsl else {})}
            facts[name] = builders.facts(name, with_gpus=True, **parts)
        inputs = dataclasses.replace(inputs, facts=facts)
    return make(inputs)


def test_70b_on_16_and_twice_8_gb() -> None:
    plan = plan_of([16, 8, 8], LLAMA_70B)
    assert plan.strategy == "pipeline" and plan.fits
    stages = sorted((rank.stage.begin, rank.stage.end) for rank in plan.ranks if rank.stage)
    assert stages[0][0] == 0 and stages[-1][1] == 80 and all(one[1] == other[0] for one, other in itertools.pairwise(stages))
    for rank in plan.ranks:
        assert rank.streaming is not None and rank.memory is not None and rank.stage is not None and not rank.memory.is_tight
        assert (
            0 < rank.streaming.layers <= rank.stage.end - rank.stage.begin and rank.streaming.group == 1 and rank.streaming.host == "memory"
        )
    resident = sum((rank.stage.end - rank.stage.begin) - rank.streaming.layers for rank in plan.ranks if rank.stage and rank.streaming)
    assert 10 <= resident <= 57, "32 GB have room for 57 layers of 0.44 GB at most"


def test_8b_on_4_gb_alone() -> None:
    plan = plan_of([4], LLAMA_8B)
    (rank,) = plan.ranks
    assert plan.fits and rank.streaming is not None and rank.streaming.group > 1
    assert rank.streaming.host_bytes == pytest.approx(rank.streaming.layers * 0.1125 * GB, rel=0.02)
    assert rank.holds_all_layers is False, "a dry run would be of a whole model on the card"


def test_what_has_room_stays() -> None:
    assert all(rank.streaming is None for cards in ([24], [12, 8]) for rank in plan_of(list(cards), LLAMA_8B).ranks)


def test_a_host_without_memory_is_no_place() -> None:
    assert plan_of([4], LLAMA_8B, host_gb=16).fits
    # 32 layers of 0.113 GB are 32 blocks of 0.134 GB, and the inputs of a group lie beside them: with less room the group is smaller
    (roomy,), (short,) = plan_of([4], LLAMA_8B, host_gb=16).ranks, plan_of([4], LLAMA_8B, host_gb=5.9).ranks
    assert roomy.streaming is not None and short.streaming is not None and 1 <= short.streaming.group < roomy.streaming.group
    with pytest.raises(DoesNotFit):
        plan_of([4], LLAMA_8B, host_gb=5.3)
    with pytest.raises(DoesNotFit, match=r"these have room for 2\.4 GB of memory on tower"):
        plan_of([4], LLAMA_8B, host_gb=3)
    with pytest.raises(DoesNotFit, match=r"do not fit on these machines|no rank has room|not even one layer"):
        plan_of([16, 8, 8], LLAMA_70B, host_gb=4)


def test_the_disk_is_the_last_resort() -> None:
    """Smaller groups of micro-batches in memory come before it, and it has to have room, too."""
    in_memory = plan_of([4], LLAMA_8B, host_gb=5.9, disk_gb=100)
    on_disk, on_hard_disk = (plan_of([4], LLAMA_8B, host_gb=4, disk_gb=100, turns=turns) for turns in (False, True))
    for plan, host, rate in ((in_memory, "memory", "12 GB/s"), (on_disk, "disk", "1.5 GB/s"), (on_hard_disk, "disk", "0.12 GB/s")):
        (rank,) = plan.ranks
        assert rank.streaming is not None and rank.streaming.host == host
        assert f"from the host's {host}: " in rank.streaming.text and f"at {rate} (assumed)" in rank.streaming.text
    assert on_disk.time is not None and on_hard_disk.time is not None
    (rank,) = on_hard_disk.ranks
    assert rank.streaming is not None and on_hard_disk.time.step_s >= 2 * rank.streaming.host_bytes / 0.12e9 > 1.5 * on_disk.time.step_s
    with pytest.raises(DoesNotFit, match=r"room for 2\.4 GB of memory on tower, 3\.0 GB of disk on tower"):
        plan_of([4], LLAMA_8B, host_gb=3, disk_gb=6)
    with pytest.raises(DoesNotFit):  # inputs of one micro-batch have no room in memory
        plan_of([4], LLAMA_8B, host_gb=0.01, disk_gb=100)


def test_what_is_faster_by_an_assumed_rate_alone_is_no_reason_for_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(work: Any, slot: Any, rows: int) -> streamed_rank.StreamedRank | None:
        host = {1: "disk", 2: "pageable", 4: "memory"}.get(rows)
        if host is None:
            return None
        streaming = StreamingPlan(layers=rows, group=1, host=host, places=2, layer_bytes=1, bytes_per_s=1.0)  # type: ignore[arg-type]
        return streamed_rank.StreamedRank(slot, rows, MemoryEstimate(items=()), streaming, float(rows))

    monkeypatch.setattr(streamed_rank, "_with_rows", found)
    recipe = builders.recipe(
        model={"name": LLAMA_8B}, method={"kind": "qlora"}, train={"global_batch": 16, "learning_rate": 1e-4, "steps": 10}
    )
    work = SimpleNamespace(recipe=recipe)
    best = streamed_rank.fastest_on(work, None)  # type: ignore[arg-type]
    assert best is not None and best.streaming is not None and best.streaming.host == "memory"


def test_beside_layers_on_a_disk_the_inputs_have_the_memory() -> None:
    """Few loads of a slow disk: twice the time of layers in memory would be no wonder at a twentieth of the rate."""
    in_memory, on_disk = (plan_of([8], "Qwen/Qwen2.5-32B", host_gb=host_gb, disk_gb=100, link=(4, 16)) for host_gb in (64, 12))
    (roomy,), (short,) = in_memory.ranks, on_disk.ranks
    assert (
        roomy.streaming is not None and short.streaming is not None and (roomy.streaming.host, short.streaming.host) == ("memory", "disk")
    )
    assert short.micro_batch * short.streaming.group > roomy.micro_batch * roomy.streaming.group
    assert in_memory.time is not None and on_disk.time is not None and on_disk.time.step_s < 1.2 * in_memory.time.step_s


def test_under_wsl_memory_that_is_not_pinned_comes_before_the_disk() -> None:
    (rank,) = plan_of([4], LLAMA_8B, host_gb=7, disk_gb=100, wsl=True).ranks
    assert rank.streaming is not None and rank.streaming.host == "pageable" and rank.streaming.bytes_per_s == 5e9
    assert "from the host's memory, which is not pinned: " in rank.streaming.text


def test_stages_of_a_pipeline_take_what_their_hosts_have() -> None:
    plan = plan_of([16, 8, 8], LLAMA_70B, host_gb=4, disk_gb=200)
    assert plan.strategy == "pipeline" and {rank.streaming.host for rank in plan.ranks if rank.streaming} == {"disk"}


@pytest.mark.parametrize(
    ("method", "why"), [({"kind": "full"}, "all weights are trained"), ({"kind": "lora", "backend": "unsloth"}, "Unsloth")]
)
def test_what_cannot_be_streamed_is_refused_as_before(method: dict[str, Any], why: str) -> None:
    recipe = builders.recipe(
        model={"name": LLAMA_8B}, method={"kind": "qlora", **method}, train={"global_batch": 16, "learning_rate": 1e-4, "steps": 10}
    )
    cluster = builders.cluster(["tower"], nodes={"tower": {"gpus": [{"model": "RTX 4090", "vram_gb": 4}]}})
    inputs = builders.plan_inputs(cluster, recipe, {})
    from homelab.controller.planning.machines import machines

    work = job.of(inputs, machines.choose(inputs), "bf16")
    assert isinstance(work, job.TrainingJob) and why in (streamed_rank.why_not(work) or "")
    with pytest.raises(DoesNotFit, match=f"layers cannot come from a host: .*{why}"):
        registry.choose_strategy(work)


def test_a_slow_transfer_is_in_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = plan_of([4], LLAMA_8B)
    monkeypatch.setattr(host_room, "PCIE_BYTES_PER_S", 5e7)
    slow = plan_of([4], LLAMA_8B)
    (rank,) = slow.ranks
    assert rank.streaming is not None and fast.time is not None and slow.time is not None
    assert slow.time.step_s >= 2 * rank.streaming.host_bytes / 5e7 > 2 * fast.time.step_s


def test_a_card_with_few_lanes_makes_the_step_longer() -> None:
    """A slot, a laptop, an external case, a riser; and as assumed."""
    full, laptop, external, riser, assumed = (
        plan_of([4], LLAMA_8B, host_gb=16, link=link) for link in ((4, 16), (4, 8), (3, 4), (3, 1), None)
    )
    times = [plan.time.step_s for plan in (full, laptop, external, riser) if plan.time is not None]
    assert len(times) == 4 and times == sorted(times) and times[0] < times[1] and times[3] > 1.8 * times[0]
    (rank,) = riser.ranks
    assert rank.streaming is not None and times[3] >= 2 * rank.streaming.host_bytes / (0.8 * 0.985e9)
    # 8 lanes of PCIe 4.0 carry about what is assumed without a link
    assert assumed.time is not None and times[1] == pytest.approx(assumed.time.step_s, rel=0.05)


def test_a_pipeline_counts_with_the_links_too() -> None:
    full, riser = (plan_of([16, 8, 8], LLAMA_70B, host_gb=64, link=link) for link in ((4, 16), (3, 1)))
    assert full.time is not None and riser.time is not None and riser.time.step_s > 2 * full.time.step_s
    assert all(rank.streaming is not None and rank.streaming.link is not None and rank.streaming.link.lanes == 1 for rank in riser.ranks)


@pytest.mark.parametrize(
    ("link", "rate", "as_json"),
    [
        ((4, 8), "12.6 GB/s (by its link: PCIe 4.0, 8 lanes)", {"generation": 4, "lanes": 8}),
        ((3, 1), "0.788 GB/s (by its link: PCIe 3.0, 1 lane)", {"generation": 3, "lanes": 1}),
        (None, "12 GB/s (assumed)", None),
    ],
)
def test_the_plan_says_where_the_rate_comes_from(link: tuple[int, int] | None, rate: str, as_json: dict[str, int] | None) -> None:
    plan = plan_of([4], LLAMA_8B, host_gb=16, link=link)
    (rank,) = plan.ranks
    assert rank.streaming is not None and rank.streaming.text.endswith(f" GB, at {rate}")
    assert any(choice.subject == "layers" and choice.value == rank.streaming.text for choice in plan.choices)
    assert json.loads(plan.model_dump_json())["ranks"][0]["streaming"]["link"] == as_json
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as printed:
        console.print(plan_table.table(plan))
    assert rate in printed.get()
    assert Plan.model_validate_json(plan.model_dump_json()).ranks == plan.ranks


def test_a_plan_of_an_older_version_is_read() -> None:
    (rank,) = plan_of([4], LLAMA_8B, host_gb=16).ranks
    assert rank.streaming is not None
    assert StreamingPlan.model_validate(rank.streaming.model_dump(exclude={"link"})) == rank.streaming
