"""A program of one's own under torchrun, and what plan, launch, logs, runs, status and stop say of it."""

from __future__ import annotations

import pytest

from scripts.practice.desk import Desk, Run, left_on, wait_until, wait_until_none_left

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(120)]


def test_a_script_from_plan_to_done(desk: Desk) -> None:
    plan = desk.json("plan", "all_reduce.toml")
    assert (plan["world_size"], plan["backend"], plan["head"]) == (3, "gloo", "node1")
    assert [(rank["rank"], rank["node"]) for rank in plan["ranks"]] == [(0, "node1"), (1, "node2"), (2, "node3")]
    assert all("torch.distributed.run" in node["command"] for node in plan["nodes"])

    launched = desk.json("launch", "all_reduce.toml", "--skip", "collective")
    assert set(launched) == {"run", "folder", "head", "nodes", "attempt"}
    assert (launched["head"], launched["nodes"], launched["attempt"]) == ("node1", ["node1", "node2", "node3"], 1)
    run = Run(desk.lab, launched["run"])
    run.wait_for_end(1, nodes=3, timeout_s=60)

    status = desk.json("status", run.name)
    assert status["state"] == "done", run.logs(1)
    assert {"run", "state", "attempt", "nodes", "ranks", "events", "next_commands", "diagnosis"} <= set(status)
    assert [node["reachable"] for node in status["nodes"]] == [True] * 3

    for rank, node in enumerate(("node1", "node2", "node3")):
        found = desk.json("logs", run.name, "--rank", str(rank))["ranks"]
        assert found == {str(rank): {"node": node, "stdout": [f"rank {rank} of 3: the sum is 6"], "stderr": found[str(rank)]["stderr"]}}
    assert "the sum is 6" in desk.homelab("logs", run.name).stdout
    assert "rank 7" in desk.json("logs", run.name, "--rank", "7", code=2)["error"]["message"]

    runs = desk.json("runs")
    assert runs["unreachable"] == {}
    row = next(row for row in runs["runs"] if row["name"] == run.name)
    assert (row["state"], row["attempt"], row["nodes"]) == ("done", 1, ["node1", "node2", "node3"])


@pytest.mark.thorough  # test_interrupt and test_recover_refusals stop runs, too
def test_stop_leaves_nothing(desk: Desk) -> None:
    run = desk.launch("sleeper.toml")
    ranks = [rank for node in ("node1", "node2", "node3") for rank in run.folder(node).glob("attempts/1/nodes/*/agent.json")]
    assert len(ranks) == 3
    desk.homelab("logs", run.name)
    # Not before every worker has its orphan: `stop` must find those, too.
    for node in ("node1", "node2", "node3"):
        run.wait_for_output(1, node, "asleep")
    assert sum("sleep" in words for words in left_on(desk.lab).values()) >= 3
    assert desk.json("status", run.name)["state"] == "running", "it prints"
    stopped = desk.json("stop", run.name)
    wait_until_none_left(desk.lab)
    assert stopped["clean"] is True
    assert all(answer["asked"] >= 3 and answer["left"] == [] for answer in stopped["nodes"].values())
    assert desk.json("status", run.name)["state"] == "stopped"
    assert desk.json("stop", run.name)["clean"] is True
    row = next(row for row in desk.json("runs")["runs"] if row["name"] == run.name)
    assert row["state"] == "stopped"


RESUMER = """
import json, os, re, time
import torch.distributed as dist

dist.init_process_group("gloo")
saved = os.environ["HOMELAB_CHECKPOINT_DIR"]
steps = {int(re.search(r"\\d+", name)[0]): name for name in os.listdir(saved) if re.fullmatch(r"step-\\d+", name)}
begin, total = 0, 0
if steps:
    begin = max(steps)
    total = json.load(open(os.path.join(saved, steps[begin], "state.json")))["total"]
everywhere = [None] * dist.get_world_size()
dist.all_gather_object(everywhere, (begin, total))
assert len(set(everywhere)) == 1, everywhere
print("begins at", begin, "with", total, flush=True)
for step in range(begin + 1, 61):
    total += step
    time.sleep(0.1)
    dist.barrier()
    if step % 10 == 0 and dist.get_rank() == 0:
        place = os.path.join(saved, f".step-{step}")
        os.makedirs(place, exist_ok=True)
        with open(os.path.join(place, "state.json"), "w") as file:
            json.dump({"total": total}, file)
        os.rename(place, os.path.join(saved, f"step-{step}"))
        print("saved", step, flush=True)
print("the sum is", total, flush=True)
"""


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_a_program_goes_on_from_what_it_saved_also_without_the_node_that_died(desk: Desk) -> None:
    """Only the head has the checkpoint. A worker dies, then a whole node; every node begins at the same step."""
    desk.write("resumer.py", RESUMER)
    desk.write("resumer.toml", '[script]\npath = "resumer.py"\n')
    run = desk.launch("resumer.toml")
    run.wait_for_output(1, "node1", "saved 20")
    desk.lab.fault("node3", "kill-worker")
    wait_until(lambda: len(run.exits(1)) == 3, 60, lambda: run.logs(1))
    again = desk.json("recover", run.name)
    assert again["attempt"] == 2 and again["resume_step"] >= 20
    run.wait_for_output(2, "node3", f"begins at {again['resume_step']} with")

    run.wait_for_output(2, "node1", "saved 50")
    desk.lab.fault("node2", "power-cut")
    last = desk.json("recover", run.name, timeout_s=180)
    assert last["attempt"] == 3 and last["resume_step"] >= 50 and last["nodes"] == ["node1", "node3"]
    run.wait_for_end(3, nodes=2)
    assert run.logs(3).count("the sum is 1830") == 2, run.logs(3)
    assert desk.json("status", run.name)["state"] == "done"
