"""One side of `scripts/bench speed`: homelab's own worker, whole, with a pause after every step. python -m benchmarks.pace.with_homelab FOLDER"""

from __future__ import annotations

import os
import sys
from typing import Any

from benchmarks.pace.turns import Turns


def main(folder: str) -> int:
    """Train the run of the folder."""
    os.environ |= {"HOMELAB_RUN_DIR": folder, "HOMELAB_ATTEMPT": "1", "HOMELAB_NODE": "n0"}
    from homelab.worker.runtime import imports
    from homelab.worker.runtime.metrics_recorder import Recorder
    from homelab.worker.runtime.task import load_task
    from homelab.worker.training.run import Run

    turns = Turns()

    class Paused(Run):
        """A worker that waits for its turn."""

        def _before_first(self, trainer: Any) -> None:
            super()._before_first(trainer)
            turns.begin()

        def _after_step(self, trainer: Any) -> None:
            if trainer.state.global_step == self.recorder.total_steps:
                os._exit(0)  # the last step is not measured: what is saved then belongs to no step
            super()._after_step(trainer)
            turns.told(trainer.step_loss)

    task = load_task(os.environ)
    imports.prepare(task.run, bitsandbytes=False)
    Paused(task, Recorder(task)).go()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
