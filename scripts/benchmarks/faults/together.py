"""Two at the same moment: launches and recoveries from two terminals or two machines, and a stop while something starts."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time

from benchmarks.faults.ground import BEGIN_S, SeenRun, left_on
from benchmarks.faults.scene import Case, Scene, Unexpected

from homelab.controller.run.paths import RunPaths
from scripts.practice.desk import Desk, copy_of_cluster

QUIET_S = 5.0  # a command that the stop did not reach has begun by then
_turns = itertools.count()


def two_launches(scene: Scene) -> None:
    """The same recipe is launched twice within a moment, in turn from one desk and from two: one of them trains, undisturbed."""
    desks = (scene.ground.desk, scene.ground.desk if next(_turns) % 2 == 0 else _second(scene))
    ended = _both(scene, desks, "launch", "train.toml", "--skip", "collective", "--json", apart_s=0.5)
    (desk, output), (_, refusal) = _winner(ended)
    scene.run = _seen(scene, desk, json.loads(output)["run"])
    if not any(words in refusal for words in (scene.run.name, "another run", "another homelab command")):
        raise Unexpected(f"who was refused is not told by whom: {refusal[-500:]}")
    with scene.fault():
        scene.finish()


def two_recoveries(scene: Scene) -> None:
    """A run that was stopped is recovered by hand from two machines within a moment: one of them goes on with it, undisturbed."""
    scene.train()
    other = _second(scene)
    scene.ground.desk.homelab("stop", scene.run.name)
    other.homelab("status", scene.run.name, "--once")
    with scene.fault():
        (desk, _), _ = _winner(_both(scene, (scene.ground.desk, other), "recover", scene.run.name, apart_s=1.0))
        scene.run = _seen(scene, desk, scene.run.name)
        scene.finish()


def stop_launching(scene: Scene) -> None:
    """A launch is stopped at a random moment, from the writing of its plan on."""
    desk, earlier = scene.ground.desk, {run.name for run in scene.ground.runs()}
    launch = desk.spawn("launch", "train.toml", "--skip", "collective")
    try:
        scene.until(lambda: any(run.plan(1) for run in scene.ground.runs() if run.name not in earlier), "plan", BEGIN_S)
        scene.run = next(run for run in scene.ground.runs() if run.name not in earlier)
        time.sleep(scene.draw.uniform(0.0, 3.0))
        with scene.fault():
            _stop(scene, desk, launch)
    finally:
        launch.kill()


def stop_recovering(scene: Scene) -> None:
    """A recovery by hand is stopped at a random moment, from the same machine or from another one."""
    scene.train()
    desks = (scene.ground.desk, _second(scene))
    desks[0].homelab("stop", scene.run.name)
    desks[1].homelab("status", scene.run.name, "--once")
    recovering = scene.draw.choice(desks)
    recover = recovering.spawn("recover", scene.run.name)
    scene.run = _seen(scene, recovering, scene.run.name)
    try:
        time.sleep(scene.draw.uniform(0.0, 5.0))
        with scene.fault():
            _stop(scene, scene.draw.choice(desks), recover)
    finally:
        recover.kill()


def _stop(scene: Scene, desk: Desk, beside: subprocess.Popen[str]) -> None:
    """Stop, and see to it that nothing of the run is there from then on, however the other command ends."""
    done = desk.homelab("stop", scene.run.name, timeout_s=BEGIN_S)
    output, _ = beside.communicate(timeout=BEGIN_S)
    if "Traceback" in output or beside.returncode not in (0, 1, 2):
        raise Unexpected(f"the command beside left with {beside.returncode}: {output[-600:]}")
    deadline = time.monotonic() + QUIET_S
    while time.monotonic() < deadline:
        if left := left_on(scene.lab):
            raise Unexpected(f"it was stopped: {done.stdout}\nand lives: {'; '.join(left.values())}\n{output[-600:]}")
        time.sleep(0.1)
    scene.until(lambda: not scene.run.supervisor_alive(), "end of the supervisor", 60.0)
    state = desk.json("status", scene.run.name)["state"]
    if state != "stopped":
        raise Unexpected(f"it was stopped, and status says {state}")


def _both(scene: Scene, desks: tuple[Desk, Desk], *words: str, apart_s: float) -> list[tuple[Desk, int, str]]:
    """(desk, exit code, what it said) of a command that is typed on two desks, at most `apart_s` apart, the first one first."""
    begun = []
    try:
        for desk in desks:
            begun.append((desk, desk.spawn(*words)))
            time.sleep(scene.draw.uniform(0.0, apart_s))
        outputs = [process.communicate(timeout=BEGIN_S)[0] for _, process in begun]
        return [(desk, process.returncode, text) for (desk, process), text in zip(begun, outputs, strict=True)]
    finally:
        for _, process in begun:
            process.kill()


def _winner(ended: list[tuple[Desk, int, str]]) -> tuple[tuple[Desk, str], tuple[Desk, str]]:
    """The winner and the loser, where exactly one command won. Raises Unexpected."""
    won, lost = [(desk, text) for desk, code, text in ended if code == 0], [(desk, text) for desk, code, text in ended if code in (1, 2)]
    if len(won) != 1 or len(lost) != 1 or not ("fix" in lost[0][1] or "hint" in lost[0][1]):
        raise Unexpected("; ".join(f"exit code {code}: {text[-400:]}" for _, code, text in ended))
    return won[0], lost[0]


def _second(scene: Scene) -> Desk:
    """Another machine with the same cluster and the same recipe; its supervisors end with the case."""
    ground = scene.ground
    folder = ground.desk.folder.parent / "second desk"
    cluster = copy_of_cluster(scene.lab, folder)
    for name in ("train.toml", "chats.jsonl"):
        shutil.copyfile(ground.desk.folder / name, folder / name)

    def clean() -> None:
        for path in (folder / "runs").glob("*"):
            SeenRun(scene.lab, path.name, RunPaths(path)).kill_supervisor()

    scene.undo.callback(clean)
    return Desk(folder, scene.lab, cluster, supervise=True)


def _seen(scene: Scene, desk: Desk, name: str) -> SeenRun:
    run = SeenRun(scene.lab, name, RunPaths(desk.folder / "runs" / name))
    run.mounted = scene.mounted
    return run


CASES = (
    Case("two-launches", "one recipe is launched twice at once", "other", two_launches, restarts=(0, 0)),
    Case("two-recoveries", "one run is recovered from two machines at once", "other", two_recoveries, restarts=(1, 1)),
    Case("stop-launching", "a launch is stopped at any moment", "other", stop_launching, restarts=(0, 0), ends="stopped"),
    Case("stop-recovering", "a recovery is stopped at any moment", "other", stop_recovering, restarts=(0, 1), ends="stopped"),
)
