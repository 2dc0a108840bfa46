"""`homelab bench recipes/bench/lab.toml` on three practice nodes, with a rank killed in the middle of it.

cells                                 cells of the suite
cells_done                            cells with all their runs
plan_tokens_per_s_worst_error_percent the plans that were made from measured speeds, against what came: median of a cell, the worst cell
plan_tokens_per_s_worst_run_percent   the same of the worst single run
repeat_spread_percent                 highest less lowest tokens/s over the median, the worst cell
minutes                               of the whole suite
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report

from homelab.lab import Lab

_REPOSITORY = Path(__file__).resolve().parents[2]
_SHARED = Path("/tmp/homelab-bench")  # as the suite's recipe names it
_LIMIT_S = 45 * 60
_KILLED_IN = "zero2-node1-node2-node3"


def main() -> int:
    """Returns 0, or 1 where a cell has no figure."""
    options = report.arguments(__doc__ or "")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that the lab is taken down
    folder = Path(tempfile.mkdtemp(prefix="homelab-bench-"))
    is_ours = not _SHARED.exists()
    try:
        if is_ours:
            shutil.copytree(Path(os.environ["HOMELAB_MODEL"]), _SHARED / "model", symlinks=False)
        with Lab.up(folder / "lab", nodes=3, cpu=[0.6] * 3, rate="2.5gbit", shared=[_SHARED]) as lab:
            began = time.monotonic()
            killed = _run(lab, folder)
            minutes = (time.monotonic() - began) / 60
        said = json.loads((folder / "said.json").read_text())
        if "cells" not in said:
            raise SystemExit(f"error: homelab bench ended early: {said}")
        cells: list[dict[str, Any]] = said["cells"]
        with (folder / "out" / "results.csv").open(encoding="utf-8", newline="") as stream:
            runs: list[dict[str, Any]] = list(csv.DictReader(stream))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if is_ours:
            shutil.rmtree(_SHARED, ignore_errors=True)
    done = [cell for cell in cells if cell["tokens_per_s"] is not None and not cell["because"]]
    figures = {
        "cells": float(len(cells)), "cells_done": float(len(done)), "minutes": minutes,
        "plan_tokens_per_s_worst_error_percent": 100 * max((abs(cell["plan_error"]) for cell in cells if cell["plan_error"] is not None), default=float("nan")),
        "plan_tokens_per_s_worst_run_percent": 100 * max((abs(cell["plan_error_most"]) for cell in cells if cell["plan_error_most"] is not None), default=float("nan")),
        "repeat_spread_percent": 100 * max((cell["spread"] for cell in cells if cell["spread"] is not None), default=float("nan")),
    }  # fmt: skip
    rows = [(f"{cell['strategy']} on {len(cell['nodes'])}, tokens/s", f"{cell['tokens_per_s'] or 0:.0f}") for cell in cells]
    report.finish("suite", figures, runs, [*rows, ("a rank was killed in", killed)], options.json)
    return 0 if len(done) == len(cells) else 1


def _command(output: Path) -> list[str]:
    return [sys.executable, "-m", "homelab", "bench", "recipes/bench/lab.toml", "--output", str(output), "--json"]


def _environment(cluster: Path) -> dict[str, str]:
    return os.environ | {"HOMELAB_CLUSTER": str(cluster), "PYTHONPATH": str(_REPOSITORY)}


def _run(lab: Lab, folder: Path) -> str:
    """The suite to its end, with what it says in said.json; the run in which a rank was killed."""
    with (folder / "said.json").open("w") as said:
        process = subprocess.Popen(_command(folder / "out"), env=_environment(lab.cluster_file), stdout=said, cwd=_REPOSITORY)
    killed = ""
    try:
        deadline = time.monotonic() + _LIMIT_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
            if not killed and (run := _trains(lab)):
                lab.fault("node2", "kill-worker")
                killed = run
                print(f"killed a rank of {run}", file=sys.stderr, flush=True)
    finally:
        if process.poll() is None:
            process.terminate()  # a background job of a shell ignores Ctrl-C
            process.wait(timeout=120)
    return killed


def _trains(lab: Lab) -> str:
    """The first run of the cell that is to be disturbed, when it has done some steps."""
    for folder in Path(lab.state.node("node2").workdir).glob(f"runs/*-{_KILLED_IN}*"):
        if any(
            sum('"train"' in line for line in file.read_text().splitlines()) >= 4
            for file in folder.glob("attempts/1/ranks/*/metrics.jsonl")
        ):
            return folder.name
    return ""


if __name__ == "__main__":
    sys.exit(main())
