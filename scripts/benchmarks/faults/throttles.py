"""Slow nodes: a node with less processor than before still computes, and the run must not be restarted for it."""

from __future__ import annotations

from benchmarks.faults.ground import ROWS, SLOW, SeenRun
from benchmarks.faults.scene import Case, Scene

# Of what a node usually has, which is half a core here, so that a step takes about a second. The sudden one comes first: nobody has
# seen slow steps then, and no row has gone to another node.
USUAL_CORES = 0.5
PARTS = (1 / 10, 1 / 2, 1 / 3)  # a desktop in heavy use, a laptop without its charger, a desktop in use
STEPS_EACH = 2
RECIPE = "slow.toml"
STEPS = SLOW["epochs"] * ROWS // SLOW["global_batch"]


def slowed(scene: Scene) -> None:
    """Each node in turn is slowed to a tenth, a half and a third of its processor, from the first steps on."""
    scene.reference, scene.epochs = _reference(scene), SLOW["epochs"]
    scene.launch(RECIPE)
    names = scene.run.node_names(1)
    first = scene.draw.randint(3, 6)
    scene.until(lambda: _step(scene.run) >= 1, "first step")
    for name in names:
        scene.lab.fault(name, f"throttle={USUAL_CORES}")
    scene.until(lambda: _step(scene.run) >= first, f"step {first}")
    scene.draw.shuffle(names)
    scene.victim = ", ".join(names)
    with scene.fault():
        for name in names:
            for part in PARTS:
                scene.lab.fault(name, f"throttle={USUAL_CORES * part:.3f}")
                _do(scene, STEPS_EACH)
            scene.lab.fault(name, f"throttle={USUAL_CORES}")
    scene.finish()


def _do(scene: Scene, steps: int) -> None:
    """Wait for so many steps more."""
    target_step = min(_step(scene.run) + steps, STEPS - 1)
    scene.until(lambda: _step(scene.run) >= target_step, f"step {target_step}")


def _reference(scene: Scene) -> SeenRun:
    """The same training, undisturbed; done once."""
    if scene.ground.slow_reference is None:
        run = scene.ground.launch(RECIPE)
        scene.until(lambda: run.supervisor().get("doing") in ("ended", "given up"), "end of the undisturbed run")
        assert run.supervisor().get("why") == "done", run.logs(run.attempt())
        scene.ground.slow_reference = run
    return scene.ground.slow_reference


def _step(run: SeenRun) -> int:
    """The newest step of the newest attempt: a run that was restarted for nothing is seen to its end all the same."""
    return int(run.heartbeat(run.attempt()).get("step", 0))


CASES = (Case("slowed", "each node in turn slowed to a half, a third, a tenth", "quiet", slowed, restarts=(0, 0)),)
