"""What the dashboard costs while it is open: `homelab status` on a terminal, over a run on eight practice nodes.

cpu_percent_8_nodes          processor time of the dashboard's process, of one core
round_trips_per_node_per_s   questions to a node, per second
"""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report

from homelab.controller.remote.agent import Agent
from homelab.lab import Lab

_NODES = 8
_WARM_S, _MEASURED_S, _LIMIT_S = 10.0, 60.0, 120.0
_PROGRAM = "import time\nfor number in range(100000):\n    print('line', number, flush=True)\n    time.sleep(1)\n"
# In the dashboard's own process: questions are counted, and processor time is read, without another program in its way.
_COUNTED = """
import json, sys, threading, time
from benchmarks.dashboard import counted
from homelab.cli import main
counts = counted()
warm_s, measured_s, file = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
def measure():
    time.sleep(warm_s)
    began = (time.monotonic(), time.process_time(), counts["questions"])
    time.sleep(measured_s)
    figures = {"seconds": time.monotonic() - began[0], "cpu_s": time.process_time() - began[1], "questions": counts["questions"] - began[2]}
    open(file, "w").write(json.dumps(figures))
threading.Thread(target=measure, daemon=True).start()
sys.argv = ["homelab", *sys.argv[4:]]
main.main()
"""


def counted() -> dict[str, int]:
    """{"questions": how many this process asks its nodes from now on}: most of them go through a line that stays open, the others through a session each."""
    counts, run = {"questions": 0}, Agent._run

    def counting(*words: Any, **options: Any) -> Any:
        counts["questions"] += 1
        return run(*words, **options)

    Agent._run = counting
    return counts


def main() -> int:
    """Measure `--repeats` times. Returns 0 when both figures hold: 5 percent, one question a second."""
    options = report.arguments(__doc__ or "")
    folder = Path(tempfile.mkdtemp(prefix="homelab-bench-"))
    try:
        with Lab.up(folder / "lab", nodes=_NODES) as lab:
            measured = _measured(lab, folder, options.repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    percents = [100.0 * entry["cpu_s"] / entry["seconds"] for entry in measured]
    questions = [entry["questions"] / entry["seconds"] / _NODES for entry in measured]
    figures = {"cpu_percent_8_nodes": statistics.median(percents), "round_trips_per_node_per_s": statistics.median(questions)}
    rows = [
        ("cpu percent", " ".join(f"{value:.1f}" for value in percents)),
        ("round trips", " ".join(f"{value:.2f}" for value in questions)),
    ]
    report.finish("dashboard", figures, measured, rows, options.json)
    return 0 if figures["cpu_percent_8_nodes"] <= 5 and figures["round_trips_per_node_per_s"] <= 1 else 1


def _measured(lab: Lab, folder: Path, repeats: int) -> list[dict[str, Any]]:
    (folder / "sleeper.py").write_text(_PROGRAM)
    (folder / "sleeper.toml").write_text('[script]\npath = "sleeper.py"\n')
    same = ["--cluster", str(lab.cluster_file), "--runs-dir", str(folder / "runs")]
    command = [sys.executable, "-m", "homelab"]
    subprocess.run(
        [*command, "launch", str(folder / "sleeper.toml"), *same, "--no-supervise"], check=True, stdout=subprocess.DEVNULL, timeout=_LIMIT_S
    )
    try:
        return [_once(folder / f"figures-{number}.json", same) for number in range(repeats)]
    finally:
        subprocess.run([*command, "stop", *same], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_LIMIT_S)


def _once(file: Path, same: list[str]) -> dict[str, Any]:
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm", COLUMNS="200", LINES="50")
        os.execv(sys.executable, [sys.executable, "-c", _COUNTED, str(_WARM_S), str(_MEASURED_S), str(file), "status", *same])
    deadline_s = time.monotonic() + _WARM_S + _MEASURED_S + 30
    try:
        while not file.is_file():
            if time.monotonic() > deadline_s:
                raise SystemExit("error: the dashboard has not been measured in time")
            if select.select([terminal], [], [], 0.5)[0]:
                os.read(terminal, 65536)
        time.sleep(0.1)
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures
    finally:
        os.write(terminal, b"q")
        while select.select([terminal], [], [], 5)[0]:
            try:
                if not os.read(terminal, 65536):
                    break
            except OSError:
                break
        os.close(terminal)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main())
