"""A night of the queue on practice nodes: five jobs, of which one does not fit and one fails; the runner is killed twice. Nothing is lost or left."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from scripts.practice.desk import Desk, copy_of_cluster, wait_until
from tests.cli.test_nodes import edit

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]
HUGE = """[model]
name = "Qwen/Qwen3-32B"
[data]
train = "chats.jsonl"
[method]
kind = "full"
[train]
global_batch = 8
steps = 2
learning_rate = 1e-3
"""
SKIPPED = ("--skip", "collective", "--skip", "model")


def folder_of(desk: Desk, number: int) -> str:
    (file,) = (desk.folder / "runs" / "queue").glob(f"*/{number:04d}.json")
    return file.parent.name


def run_of(desk: Desk, number: int) -> str:
    (file,) = (desk.folder / "runs" / "queue").glob(f"*/{number:04d}.json")
    return str(json.loads(file.read_text())["run"])


def test_five_jobs_and_a_runner_that_is_killed(desk: Desk) -> None:
    def add(name: str, program: str, *options: str) -> None:
        desk.write(f"{name}.py", program)
        desk.write(f"{name}.toml", f'[script]\npath = "{name}.py"\n')
        desk.homelab("queue", "add", f"{name}.toml", *SKIPPED, *options)

    desk.cluster = copy_of_cluster(desk.lab, desk.folder / "owner")
    desk.cluster.write_text(f"{desk.cluster.read_text()}\n[notify]\ncommand = 'cat >> {desk.folder}/told'\n")
    add("first", "print('here', flush=True)\n", "--nodes", "node1")
    # Nobody knows yet what these machines have: they are off.
    true = desk.cluster
    for node in ("node1", "node2"):
        edit(desk, node, port=1)
    desk.write("huge.toml", HUGE)
    said = desk.homelab("queue", "add", "huge.toml", *SKIPPED).stdout
    assert "no machine answers" in said
    desk.cluster = true
    add("bad", "raise ValueError('the data has no column text')\n", "--nodes", "node2")
    add("long", "import time\nprint('here', flush=True)\ntime.sleep(45)\n")
    add("last", "print('here', flush=True)\n")
    assert [one["number"] for one in desk.json("queue")["jobs"]] == [1, 2, 3, 4, 5]

    runner = desk.spawn("queue", "run", HOMELAB_SUPERVISE="here")
    wait_until(lambda: folder_of(desk, 1) == "done", 200.0)
    runner.kill()  # between two jobs
    runner.communicate()
    runner = desk.spawn("queue", "run", HOMELAB_SUPERVISE="here")
    wait_until(lambda: folder_of(desk, 4) == "running" and bool(run_of(desk, 4)), 300.0)
    long = run_of(desk, 4)
    wait_until(lambda: desk.json("status", long, code=None).get("state") == "running", 100.0)  # its folder comes before its run.json
    runner.kill()  # while one trains
    runner.communicate()
    assert desk.json("status", long)["state"] == "running" and desk.json("queue")["runner"] is False
    runner = desk.spawn("queue", "run", HOMELAB_SUPERVISE="here")
    out, _ = runner.communicate(timeout=300)
    assert runner.returncode == 0 and "2 done, 0 failed" in out, out  # what this runner has seen the end of; the list has all

    jobs = {one["number"]: one for one in desk.json("queue")["jobs"]}
    assert {number: one["state"] for number, one in jobs.items()} == {1: "done", 2: "failed", 3: "failed", 4: "done", 5: "done"}
    # Its 64 GB of weights have no room in the memory of the lab's nodes, and on some machines none on the disk, which is looked at first.
    assert any(words in jobs[2]["because"] for words in ("lacks", "fit", "this recipe needs")), jobs[2]["because"]
    assert "the data has no column text" in jobs[3]["because"], jobs[3]
    started = Counter(Path(json.loads(file.read_text())["recipe_file"]).stem for file in (desk.folder / "runs").glob("*/run.json"))
    assert started == {"first": 1, "bad": 1, "long": 1, "last": 1}
    assert run_of(desk, 4) == long
    told = (desk.folder / "told").read_text().splitlines()
    assert told.count("homelab: queue over") == 1 and "homelab: job 2, huge.toml gave up" in told, told
    assert told[told.index("homelab: queue over") + 1] == "3 done, 2 failed: job 2 (huge.toml), job 3 (bad.toml)."
