"""Faults of what lies on disks and in memory: full disks, damaged checkpoints, changed data, no memory, a program with an error."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.scene import Case, Scene

from homelab.controller.run import store
from homelab.lab import procfs
from scripts.practice.misconfigurations.node_changes import inside, mounted, view

ROOM_BYTES = 48 << 10  # room for the metrics that the ranks write at every step; a checkpoint is larger


def disk_full(scene: Scene) -> None:
    """The disk of a node has no room for the next checkpoint; the rest of the run sees a full disk there."""
    node = scene.node()
    workdir = scene.lab.state.node(node).workdir
    scene.undo.enter_context(mounted(scene.lab, node, workdir, "-t", "tmpfs", "-o", "size=16g", "tmpfs"))
    scene.mounted.add(node)
    scene.train()
    scene.victim = node
    disk = os.statvfs(view(scene.lab, node, workdir))
    used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    with scene.fault():
        inside(scene.lab, node, "mount", "-o", f"remount,size={used + ROOM_BYTES}", workdir)
    scene.finish()


def checkpoint_truncated(scene: Scene) -> None:
    """The newest checkpoint is cut short on every node, then all workers die at once."""
    _damaged(scene, lambda file: os.truncate(file, file.stat().st_size // 2))


def checkpoint_flipped(scene: Scene) -> None:
    """One bit of the newest checkpoint is another one on every node, then all workers die at once."""

    def flip(file: Path) -> None:
        with file.open("r+b") as stream:
            place = scene.draw.randrange(file.stat().st_size)
            stream.seek(place)
            byte = stream.read(1)[0]
            stream.seek(place)
            stream.write(bytes([byte ^ (1 << scene.draw.randrange(8))]))

    _damaged(scene, flip)


def _damaged(scene: Scene, damage: Callable[[Path], None]) -> None:
    scene.train()
    # Two checkpoints must exist, because one must stay good.
    scene.until(lambda: len(list(scene.run.folder("node1").glob("checkpoints/step-*"))) >= 2, "second checkpoint")
    scene.node()
    nodes = scene.run.node_names(1)
    workers = [
        pid for name in nodes for pid in {*scene.processes(name, "homelab.worker")} - {*scene.processes(name, "torch.distributed.run")}
    ]
    folders = [folder for name in nodes for folder in scene.run.folder(name).glob("checkpoints/step-*")]
    newest = max(folder.name for folder in folders)
    with scene.fault():
        procfs.send(workers, signal.SIGSTOP)  # who loses a peer while it runs saves its last step
        for folder in folders:
            if folder.name == newest:
                damage(max(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size))
        procfs.send(workers, signal.SIGKILL)
    scene.finish()
    resumed = scene.run.plan(2).get("resume_step")
    assert resumed is None or resumed < int(newest.removeprefix("step-")), f"attempt 2 began with the damaged {newest}"


def data_changed(scene: Scene) -> None:
    """A data file that lies on the nodes is another one when a worker dies: given up and said; with the old one back, `homelab recover` goes on."""
    rows = scene.ground.desk.folder / "chats.jsonl"
    files = {node.name: Path(node.home) / "chats.jsonl" for node in scene.lab.nodes}
    for file in files.values():
        shutil.copyfile(rows, file)
        scene.undo.callback(file.unlink, missing_ok=True)
    scene.ground.desk.write("on-node.toml", scene.ground.recipe(data="~/chats.jsonl"))
    scene.train("on-node.toml")
    node = scene.node()
    with scene.fault():
        lines = rows.read_text(encoding="utf-8").splitlines(keepends=True)
        files[node].write_text("".join(lines[1:] + lines[:1]), encoding="utf-8")
        scene.lab.fault(node, "kill-worker")
    scene.until(lambda: scene.run.supervisor().get("doing") == "given up", "refusal", 90)
    assert "not the one the run began with" in scene.run.supervisor()["why"], scene.run.supervisor()
    refused = scene.ground.desk.homelab("recover", scene.run.name, code=None, timeout_s=120)
    assert refused.returncode != 0 and "not the one the run began with" in refused.stderr, refused.stdout + refused.stderr
    assert scene.run.attempt() == 1, "it went on with other data"
    shutil.copyfile(rows, files[node])
    scene.ground.desk.homelab("recover", scene.run.name, timeout_s=120)
    scene.finish()


def out_of_memory(scene: Scene) -> None:
    """A worker gets no more memory from now on: its address space is limited to what it has (prlimit)."""
    scene.train()
    node = scene.node()
    workers = {*scene.processes(node, "homelab.worker")} - {*scene.processes(node, "torch.distributed.run")}
    with scene.fault():
        for pid in workers:
            _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
            resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, hard))
    scene.finish()
    was, now = (_micro_batch(scene, attempt, node) for attempt in (1, 2))
    assert now < was or was == 1, f"{node} goes on with micro-batches of {now} rows, as before"


def _micro_batch(scene: Scene, attempt: int, node: str) -> int:
    return next(int(rank["micro_batch"]) for rank in scene.run.plan(attempt)["ranks"] if rank["node"] == node)


def script_error(scene: Scene) -> None:
    """A user's own program has an error on one rank: trying again would end the same way, and nothing is tried."""
    scene.run = run = scene.ground.launch("broken.toml")
    scene.victim = run.node_names(1)[1]
    scene.until(lambda: "KeyError" in run.logs(1), "error of the program")
    with scene.fault():
        pass
    scene.finish()
    diagnosis = store.read_object(run.paths.diagnosis_json(1)).get("diagnosis", {})
    named_cause = (diagnosis.get("cause"), diagnosis.get("first_node"))
    assert named_cause == ("python-error", scene.victim), f"the diagnosis says {named_cause}: {diagnosis.get('title')}"


CASES = (
    Case("disk-full", "a disk is full when a checkpoint is saved", "other", disk_full, restarts=(1, 2)),
    Case("checkpoint-cut", "the newest checkpoint is cut short", "death", checkpoint_truncated, restarts=(1, 1)),
    Case("checkpoint-bit", "one bit of the newest checkpoint is wrong", "death", checkpoint_flipped, restarts=(1, 1)),
    Case("out-of-memory", "a worker gets no more memory", "other", out_of_memory, restarts=(1, 1)),
    Case("script-error", "a user's program has an error", "refused", script_error, restarts=(0, 0), ends="given up"),
    Case("data-changed", "the data of a node changes between attempts", "refused", data_changed, restarts=(1, 1)),
)
