"""What processes are worth that wait for the next attempt: the same death with them and without them, in a run that is long enough to have them."""

from __future__ import annotations

import itertools
import signal
import statistics
import time
from collections.abc import Iterable, Mapping

from benchmarks.faults.ground import LONG
from benchmarks.faults.scene import Case, Scene

from homelab.lab import procfs
from homelab.shared.protocol import files, waiting_mark

_READY_S = 120.0
_CALM_S = 8.0  # of steps beside processes that wait and do nothing
# Words of their command lines: in an attempt that the launch began, and in one that was prepared.
LAUNCHERS, AGENTS = ("torch.distributed.run", "ranks"), ("watch", "standby")


def with_standby(scene: Scene) -> None:
    """kill -9 of a worker while the processes of the next attempt wait on all nodes."""
    _begin(scene, "long.toml")
    scene.until(lambda: len(ready(scene.lab.processes_of_run(scene.run.name))) == len(scene.run.node_names(1)), "ranks that wait", _READY_S)
    ready_at = time.time()
    time.sleep(_CALM_S + scene.draw.uniform(0.0, 0.3))
    _kill(scene)
    times = scene.run.train_times(1)
    scene.step_cost = _step_s(times, ready_at, scene.fault_at) / _step_s(times, min(times.values()) + 2.0, min(times.values()) + 18.0)
    scene.finish()


def without_standby(scene: Scene) -> None:
    """The same with standby = false: the next attempt begins with its imports."""
    _begin(scene, "cold.toml")
    scene.until_step(400)
    time.sleep(scene.draw.uniform(0.0, 0.3))
    _kill(scene)
    scene.finish()


def standby_killed(scene: Scene) -> None:
    """kill -9 of the processes that wait on one node, then of a worker: that node starts new ones, the others have theirs."""
    _begin(scene, "long.toml")
    scene.until(lambda: len(ready(scene.lab.processes_of_run(scene.run.name))) == len(scene.run.node_names(1)), "ranks that wait", _READY_S)
    node = scene.node()
    procfs.send([pid for pid in scene.lab.processes_of_run(scene.run.name)[node] if waits(pid)], signal.SIGKILL)
    _kill(scene)
    scene.finish()


def prepared_faulted(scene: Scene) -> None:
    """A worker dies, and the prepared attempt goes on; there torchrun's stand-in dies on one node, and in the next one an agent, which must disturb nothing."""
    _begin(scene, "long.toml")
    scene.until(lambda: len(ready(scene.lab.processes_of_run(scene.run.name))) == len(scene.run.node_names(1)), "ranks that wait", _READY_S)
    _kill(scene)
    for attempt, words in ((2, LAUNCHERS), (3, AGENTS)):
        scene.until(lambda attempt=attempt: len(scene.run.train_times(attempt)) > 20, f"steps of attempt {attempt}", _READY_S)
        pids = [pid for pid in scene.lab.processes_of_run(scene.run.name)[scene.node()] if not waits(pid)]
        found = [pid for pid in pids if {*words} & {*procfs.command_line(pid)}]
        assert found, f"no process {' or '.join(words)} on {scene.victim}"
        procfs.send(found, signal.SIGKILL)
    scene.finish()


def _begin(scene: Scene, recipe: str) -> None:
    if scene.ground.long_reference is None:
        run = scene.ground.launch("long.toml")
        scene.until(lambda: run.supervisor().get("doing") in ("ended", "given up"), "end of the undisturbed run")
        assert run.supervisor().get("why") == "done", run.logs(run.attempt())
        scene.ground.long_reference = run
    scene.reference, scene.epochs = scene.ground.long_reference, LONG["epochs"]
    scene.launch(recipe)
    scene.until(lambda: scene.run.heartbeat(1).get("step", 0) >= 1, "first step")


def _kill(scene: Scene) -> None:
    node = scene.node()
    with scene.fault():
        scene.lab.fault(node, "kill-worker")


def waits(pid: int) -> bool:
    """Whether it is of an attempt to come."""
    environment = procfs.environment(pid)
    return waiting_mark.waits(is_marked=waiting_mark.VARIABLE in environment, name=files.text(f"/proc/{pid}/comm"))


def ready(pids_on: Mapping[str, Iterable[int]]) -> list[int]:
    """Of a run's processes on each node: ranks of an attempt to come whose imports are done."""
    return [pid for pid in itertools.chain.from_iterable(pids_on.values()) if files.text(f"/proc/{pid}/comm") == waiting_mark.WAITS]


def _step_s(times: dict[int, float], begin: float, end: float) -> float:
    """The median step between two moments."""
    done = sorted(at for at in times.values() if begin <= at <= end)
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(done))


CASES = (
    Case("standby", "kill -9 of a worker, and the next attempt is prepared", "death", with_standby),
    Case("cold", "kill -9 of a worker, and nothing is prepared", "death", without_standby),
    Case("standby-killed", "kill -9 of what waits on one node, then of a worker", "death", standby_killed),
    Case(
        "standby-twice",
        "in the attempt that was prepared torchrun's stand-in dies, in the next one an agent",
        "death",
        prepared_faulted,
        (2, 2),
    ),
)
