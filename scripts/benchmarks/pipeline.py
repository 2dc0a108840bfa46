"""One model cut over three practice nodes of unequal CPUs, against the sum of their speeds, torch's own schedule and an equal cut.

pipeline_over_sum_m16       tokens/s of the pipeline over the sum of what the nodes do alone at the same time, 16 micro-batches a step; of 1 - 2/18 = 0.889 at best
pipeline_over_sum_m32       the same with 32; of 0.941
schedule_over_sum_m16, m32  the same over the speeds that the nodes had in that very step (their part of the model over the seconds in which they computed): without
                            what changes on a machine between two measurements, and without what passes of a pipeline cost more than others
over_torch_1f1b_m16         seconds of torch's Schedule1F1B over ours, the same cut, in turn
over_equal_cut_m16          seconds with an equal number of layers on each node over ours, in turn
time_worst_error_percent    a step as the plan has it against real runs, at 1 Gbit/s and at 100 Mbit/s
memory_worst_error_percent  resident bytes of each stage (worker and torchrun, without the pages of the model's files) against the plan
wire_worst_error_percent    bytes on each cable against those of the hidden states and their gradients

The cables of the first part are slowed so that a message takes about 3 % of a stage's pass, as Llama-2-13B has it on 1 Gbit/s (21 MB, 0.18 s of 5.4 s).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.pipelining import real_runs

from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.strategy.pipeline import pipeline_plan, stage_time
from homelab.lab import Lab
from homelab.shared.recipe import Method, Train
from scripts.practice.desk import Desk, Run

_CPU = [0.66, 0.47, 0.47]  # as RTX 4070, 4060 and 4060 Laptop have it, of what two cores leave
_SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
_TOKENS = 256
_RATE = "105mbit"
_ROUND_S = 240.0  # the longest that a round of all schedules may take


def main() -> int:
    """Measure schedules, then real runs. Returns 0."""
    options = report.arguments(__doc__ or "")
    if os.geteuid() != 0:
        raise SystemExit("error: the cables of a lab are slowed in namespaces, which needs root\nfix:   sudo scripts/bench pipeline")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that the lab is taken down
    with _folder() as folder:
        schedules, cut = _schedules(folder, options.repeats)
        runs = real_runs.measured(folder, _CPU)
    ratios = _ratios(schedules, cut)
    figures = {name: statistics.median(values) for name, values in ratios.items()} | {
        f"{what}_worst_error_percent": max(abs(run[f"{what}_error_percent"]) for run in runs if f"{what}_error_percent" in run)
        for what in ("memory", "time", "wire")
    }
    rows = [(name, report.spread(values)) for name, values in ratios.items()]
    rows += [(f"{run['what']}", run["text"]) for run in runs]
    report.finish("pipeline", figures, [{"cut": cut, **schedules}, *runs], [("layers on each node", str(cut)), *rows], options.json)
    return 0


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="homelab-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _schedules(folder: Path, rounds: int) -> tuple[dict[str, Any], list[int]]:
    """Seconds of each way in turn, and the planner's cut."""
    with Lab.up(folder / "lab", nodes=3, backend="namespaces", rate=_RATE, cpu=_CPU) as lab:
        desk = Desk(folder / "desk", lab)
        desk.folder.mkdir()
        shutil.copy(Path(__file__).parent / "pipelining" / "on_node.py", desk.folder)
        alone = _on_nodes(desk, {"rounds": 1, "cuts": {}, "steps": []})
        cut = _best_cut([statistics.median(values) for values in zip(*alone["alone_s"], strict=True)])
        layers = _SHAPE["num_hidden_layers"]
        equal = [layers // 3 + (number < layers % 3) for number in range(3)]
        steps = [["pipeline_m16", "best", 16], ["torch_m16", "best", 16], ["equal_m16", "equal", 16], ["pipeline_m32", "best", 32]]
        return _on_nodes(desk, {"rounds": rounds, "cuts": {"best": cut, "equal": equal}, "steps": steps}), cut


def _best_cut(pass_s: list[float]) -> list[int]:
    """The planner's cut for these speeds, the nodes in their order."""
    layers, work = _SHAPE["num_hidden_layers"], _costs().work
    cuts = pipeline_plan.best_cuts(
        3, layers, lambda rank, stage: layers, lambda rank, stage, count: work(count, is_last=stage == 2) * pass_s[rank]
    )
    return list(next(cut for cut in cuts if cut.order == (0, 1, 2)).layers)


def _costs() -> stage_time.Costs:
    """Of a pass, the parts of layers and head."""
    shape = _SHAPE
    heads = shape["num_attention_heads"]
    architecture = Architecture(
        shape["hidden_size"], shape["num_hidden_layers"], heads, shape["num_key_value_heads"], shape["hidden_size"] // heads, shape["intermediate_size"],
        shape["vocab_size"], tied_embeddings=False,
    )  # fmt: skip
    train = Train(global_batch=16, steps=1, learning_rate=1e-3, seq_len=_TOKENS, fused_loss=False, gradient_checkpointing=False)
    return stage_time.costs_of(architecture, Method(kind="lora", rank=8, alpha=16), train, 1.0)


def _on_nodes(desk: Desk, asked: dict[str, Any]) -> dict[str, Any]:
    """What the program on the nodes has measured."""
    argument = json.dumps({"shape": _SHAPE, "tokens": _TOKENS, **asked})
    desk.write("on_node.toml", f"[script]\npath = \"on_node.py\"\nargs = ['{argument}']\n")
    name = desk.json("launch", "on_node.toml", "--skip", "collective", timeout_s=_ROUND_S)["run"]
    run = Run(desk.lab, name)
    try:
        run.wait_for_end(1, len(desk.lab.nodes), timeout_s=_ROUND_S * (1 + asked["rounds"]))
        return dict(json.loads((run.folder("node1") / "result.json").read_text()))
    except OSError as error:
        raise SystemExit(f"error: the nodes have measured nothing\n{run.logs(1)}") from error
    finally:
        desk.homelab("stop", name, code=None)


def _ratios(schedules: dict[str, Any], cut: list[int]) -> dict[str, list[float]]:
    """The figures of each round."""
    steps, ratios = schedules["steps"], {}
    parts = [_costs().work(layers, is_last=stage == len(cut) - 1) for stage, layers in enumerate(cut)]
    sums = [sum(1 / pass_s for pass_s in everyone) for everyone in schedules["alone_s"]]  # passes per second of all nodes together
    for count in (16, 32):
        ratios[f"pipeline_over_sum_m{count}"] = [
            count / step_s / rate for step_s, rate in zip(steps[f"pipeline_m{count}"], sums, strict=True)
        ]
        own_sums = [
            sum(count * part / busy_s for part, busy_s in zip(parts, everyone, strict=True))
            for everyone in schedules["busy_s"][f"pipeline_m{count}"]
        ]
        ratios[f"schedule_over_sum_m{count}"] = [
            count / step_s / rate for step_s, rate in zip(steps[f"pipeline_m{count}"], own_sums, strict=True)
        ]
    for name, other in (("over_torch_1f1b_m16", "torch_m16"), ("over_equal_cut_m16", "equal_m16")):
        ratios[name] = [other_s / own_s for other_s, own_s in zip(steps[other], steps["pipeline_m16"], strict=True)]
    return ratios


if __name__ == "__main__":
    sys.exit(main())
