"""What homelab costs before training begins, and what its command line costs at all.

launch_over_ssh   seconds from `homelab launch` (preflight, plan and shipping included) to the first optimizer step, over those
                  of the same torchrun commands typed into three plain `ssh` sessions at once; three practice nodes, real model
help_over_import  seconds of `homelab --help` over `python -c "import typer, rich"`
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report

from homelab.controller.launchers.torchrun_ssh import by_hand
from homelab.controller.planning.types import Plan
from homelab.lab import Lab

_LIMIT_S = 240.0
_HOMELAB = [sys.executable, "-m", "homelab"]


def main() -> int:
    """Run both comparisons in turn. Returns 0."""
    options = report.arguments(__doc__ or "")
    runs: list[dict[str, Any]] = []
    help_s, import_s = _command_line(max(10, options.repeats), runs)
    folder = Path(tempfile.mkdtemp(prefix="homelab-bench-"))
    try:
        with Lab.up(folder / "lab", nodes=3, cpu=[0.65, 0.65, 0.65], shared=[os.environ["HOMELAB_MODEL"]]) as lab:
            launch_s, ssh_s = _starts(lab, folder, options.repeats, runs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    figures = {
        "launch_over_ssh": statistics.median(launch_s) / statistics.median(ssh_s),
        "help_over_import": statistics.median(help_s) / statistics.median(import_s),
    }
    rows = [
        ("homelab launch to the first step, s", report.spread(launch_s)),
        ("three ssh sessions to the first step, s", report.spread(ssh_s)),
        ("homelab --help, s", report.spread(help_s)),
        ("import typer, rich, s", report.spread(import_s)),
    ]
    report.finish("overhead", figures, runs, rows, options.json)
    return 0


def _command_line(repeats: int, runs: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    helps, imports = [], []
    program = str(Path(sys.executable).with_name("homelab"))
    for _ in range(repeats):
        for kind, command, times in (
            ("help", [program, "--help"], helps),
            ("import", [sys.executable, "-c", "import typer, rich"], imports),
        ):
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
            times.append(time.perf_counter() - began)
            runs.append({"what": kind, "seconds": times[-1]})
    return helps, imports


def _starts(lab: Lab, folder: Path, repeats: int, runs: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    recipe = folder / "bench.toml"
    text = Path("recipes/demo.toml").read_text(encoding="utf-8")
    text = re.sub(r"(?m)^name = .*$", lambda _: "name = " + json.dumps(os.environ["HOMELAB_MODEL"]), text, count=1)
    recipe.write_text(re.sub(r"(?m)^eval = .*$", "", text), encoding="utf-8")
    shutil.copytree("recipes/data", folder / "data")
    launched, typed = [], []
    for number in range(repeats):
        plan, seconds = _by_launch(lab, folder, recipe)
        launched.append(seconds)
        runs.append({"what": "launch", "seconds": seconds})
        seconds = _by_ssh(lab, plan, number)
        typed.append(seconds)
        runs.append({"what": "ssh", "seconds": seconds})
    return launched, typed


def _by_launch(lab: Lab, folder: Path, recipe: Path) -> tuple[Plan, float]:
    options = ["--cluster", str(lab.cluster_file), "--runs-dir", str(folder / "runs")]
    began = time.time()
    done = subprocess.run([*_HOMELAB, "launch", str(recipe), *options, "--json"], check=True, capture_output=True, timeout=_LIMIT_S)
    run = json.loads(done.stdout)["run"]
    plan = Plan.model_validate_json((folder / "runs" / run / "attempts" / "1" / "plan.json").read_text())
    seconds = _first_step(lab, plan) - began
    subprocess.run([*_HOMELAB, "stop", run, *options], check=True, stdout=subprocess.DEVNULL, timeout=60)
    return plan, seconds


def _by_ssh(lab: Lab, launched: Plan, number: int) -> float:
    """The commands of commands.sh, with a run folder of their own, each in its own ssh session."""
    name = f"{launched.run}-typed-{number}"
    plan = Plan.model_validate_json(launched.model_dump_json().replace(launched.run, name))
    for node, old in zip(plan.nodes, launched.nodes, strict=True):
        place = Path(node.run_dir)
        (place / "attempts" / "1").mkdir(parents=True)
        shutil.copyfile(Path(old.run_dir) / "run.json", place / "run.json")
        (place / "attempts" / "1" / "plan.json").write_text(plan.model_dump_json())
    began = time.time()
    sessions = [
        subprocess.Popen(
            [*lab.ssh_command(node.name), by_hand(node, node.name)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for node in plan.nodes
    ]
    try:
        return _first_step(lab, plan) - began
    finally:
        for session in sessions:
            session.terminate()
        # sshd does not end what it started: these are ours, found by their marker.
        deadline = time.monotonic() + 20
        while (left := [pid for pids in lab.processes_of_run(name).values() for pid in pids]) and time.monotonic() < deadline:
            for pid in left:
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)
        for session in sessions:
            session.wait(10)


def _first_step(lab: Lab, plan: Plan) -> float:
    """When the head's rank 0 had done its first optimizer step, by the one clock of this machine (seconds since 1970)."""
    file = Path(plan.node(plan.head).run_dir) / "attempts" / "1" / "ranks" / "0" / "metrics.jsonl"
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        if file.exists():
            for text in file.read_text().splitlines():
                if '"kind": "train"' in text:
                    return float(json.loads(text)["time"])
        time.sleep(0.05)
    raise SystemExit(f"error: no first step within {_LIMIT_S:.0f} s; see the logs in {plan.node(plan.head).run_dir}")


if __name__ == "__main__":
    sys.exit(main())
