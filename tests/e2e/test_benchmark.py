"""`homelab bench` on real nodes: killed in the middle, a cell that runs out of memory, Ctrl-C, and what is kept through all of it."""

from __future__ import annotations

import contextlib
import csv
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from homelab.lab import procfs
from scripts.practice.desk import Desk, kill_whole, left_on, read_rest, wait_until
from tests.e2e.conftest import recipe
from tests.worker import harness

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.namespaces, pytest.mark.timeout(400)]

STEPS = 20
SUITE = f"""
recipe = "bench.toml"
strategies = ["ddp"]
nodes = [["node1"], ["node1", "node2"]]
steps = {STEPS}
repeats = 1
minutes_per_run = 3
"""
# A pass of "large" needs pieces of more than 32 MB, which malloc gives back to the kernel and has to ask for again.
TWO_SIZES = """
[[variations]]
name = "small"
set = {}
[[variations]]
name = "large"
set = { model.name = "MODEL", parallel.micro_batch = 12 }
"""


@pytest.fixture
def bench(desk: Desk, model: Path, tmp_path: Path) -> Iterator[Desk]:
    """A desk of its own with a suite of three short cells."""
    own = Desk(tmp_path, desk.lab, supervise=True)
    (tmp_path / "chats.jsonl").write_text((desk.folder / "chats.jsonl").read_text())
    own.write("bench.toml", recipe(model).replace("shares = { node1 = 6, node2 = 4, node3 = 2 }", 'shares = "auto"'))
    own.write("suite.toml", SUITE)
    yield own


def workers(desk: Desk, words: str) -> list[int]:
    """The training processes of the runs that have these words in their names."""
    pids = [pid for node in desk.lab.nodes for pid in desk.lab.processes_of(node.name)]
    return [pid for pid in pids if "homelab.worker" in procfs.command_line(pid) and words in procfs.environment(pid).get("HOMELAB_RUN", "")]


def trains(desk: Desk, words: str) -> Callable[[], bool]:
    """Whether a rank of such a run has done some steps in its newest attempt."""

    def has_begun() -> bool:
        attempts = [folder for node in desk.lab.nodes for folder in Path(node.workdir).glob(f"runs/*{words}*/attempts/*")]
        newest = max((int(folder.name) for folder in attempts), default=0)
        files = [file for folder in attempts if int(folder.name) == newest for file in folder.glob("ranks/*/metrics.jsonl")]
        return bool(workers(desk, words)) and any(file.read_text().count('"train"') >= 3 for file in files)

    return has_begun


def results(desk: Desk) -> dict[str, int]:
    """Name of a result's file -> when it was written."""
    return {file.name: file.stat().st_mtime_ns for file in (desk.folder / "bench/suite/results").glob("*.json")}


def rows(desk: Desk) -> list[dict[str, str]]:
    with (desk.folder / "bench/suite/results.csv").open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_killed_in_the_middle_it_goes_on_where_it_was(bench: Desk) -> None:
    process = bench.spawn("bench", "suite.toml")
    wait_until(lambda: len(results(bench)) == 1 and trains(bench, "ddp-node1-node2")(), 120)
    kill_whole(process)
    before = results(bench)
    assert list(before) == ["alone-node1.1.json"] and left_on(bench.lab), "the run goes on without the benchmark"
    said = bench.homelab("bench", "suite.toml", timeout_s=200)
    assert "left by an interrupted benchmark" in said.stderr
    after = results(bench)
    assert {name: after[name] for name in before} == before, "what is done stays done"
    assert sorted(after) == ["alone-node1.1.json", "ddp-node1-node2.1.json"]
    lines = rows(bench)
    assert [line["state"] for line in lines] == ["done", "done"] and all(
        float(line["tokens_per_s"]) > 0 and float(line["input"]) > 0 for line in lines
    )
    assert sorted(path.name for path in (bench.folder / "bench/suite/charts").glob("*.svg")) == [
        "efficiency.svg",
        "memory.svg",
        "speed.svg",
        "time-of-a-step.svg",
    ]


def test_a_cell_that_runs_out_of_memory_does_not_end_it(bench: Desk, base: Path) -> None:
    large = harness.tiny_llama(base / "wide-llama", intermediate=8192)
    bench.write("suite.toml", SUITE + TWO_SIZES.replace("MODEL", str(large)))
    process = bench.spawn("bench", "suite.toml", "--json")
    began = trains(bench, "large-alone")
    deadline, squeezed = time.monotonic() + 300, set()
    while process.poll() is None and time.monotonic() < deadline:
        if began():
            for pid in workers(bench, "large-alone"):
                with contextlib.suppress(ProcessLookupError):  # it may end meanwhile
                    squeeze(pid)
                    squeezed.add(pid)
        time.sleep(0.01)
    said = read_rest(process)
    assert squeezed and process.returncode == 1, said
    of_cell = {(line["variation"], line["node_count"]): line for line in rows(bench)}
    assert {key: line["state"] for key, line in of_cell.items()} == {
        ("small", "1"): "done",
        ("small", "2"): "done",
        ("large", "1"): "failed",
        ("large", "2"): "done",
    }
    assert "memory" in of_cell["large", "1"]["because"], of_cell["large", "1"]
    # Started again it tries nothing twice; with --retry only the cell that failed.
    done_before = results(bench)
    bench.homelab("bench", "suite.toml", code=1)
    assert results(bench) == done_before
    bench.homelab("bench", "suite.toml", "--retry", timeout_s=120)
    assert [name for name, written in results(bench).items() if done_before[name] != written] == ["large-alone-node1.1.json"]


def squeeze(pid: int) -> None:
    """Let a process have no more memory than it has."""
    resource.prlimit(pid, resource.RLIMIT_AS, (2**30, 2**30))  # less than it has mapped


def test_control_c_stops_the_run_under_way(bench: Desk) -> None:
    process = bench.spawn("bench", "suite.toml")
    wait_until(trains(bench, "alone-node1"), 90)
    os.killpg(process.pid, signal.SIGINT)
    said = read_rest(process, timeout_s=60)
    assert process.returncode == 130 and "Traceback" not in said, said
    wait_until(lambda: not left_on(bench.lab), 20, lambda: f"{said}\n{left_on(bench.lab)}")
    assert not results(bench), "half a run is no result"
    bench.homelab("bench", "suite.toml", timeout_s=200)
    assert [line["state"] for line in rows(bench)] == ["done", "done"]
