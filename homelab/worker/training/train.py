"""The worker's entry: read the task, train, and turn what goes wrong into one clear message."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import MutableMapping

from homelab.shared.law import influences
from homelab.shared.protocol import phases, waiting_mark
from homelab.shared.protocol.errors import EXIT_FAILED
from homelab.worker.errors import WorkerError, first_words
from homelab.worker.model import unsloth
from homelab.worker.runtime import imports, waiting_rank
from homelab.worker.runtime.metrics_recorder import Recorder
from homelab.worker.runtime.task import Task, load_task
from homelab.worker.training import scheduled
from homelab.worker.training.run import Run


def main() -> int:
    """Entry of `python -m homelab.worker`. Returns 0 when the run is done, 1 when training went wrong, 2 for wrong input."""
    try:
        if waiting_mark.VARIABLE in os.environ:
            without_odd_variables(os.environ)
            waiting_rank.wait(load_task(os.environ), _prepare_imports)
        os.environ.update(scheduled.variables(os.environ))
        dropped = without_odd_variables(os.environ)
        task = load_task(os.environ)
    except WorkerError as error:
        print(error.text, file=sys.stderr, flush=True)
        return error.exit_code
    recorder = Recorder(task)
    stacks = (task.rank_dir / "stacks.txt").open("w", encoding="utf-8")  # never closed: the signal may come at any time
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        recorder.heartbeat(phases.STARTING)
        if dropped:
            recorder.note(f"law: this node sets {', '.join(dropped)}, which would change the results: not used")
        _prepare_imports(task)
        if task.method.backend == "unsloth":
            unsloth.begin(task)
        Run(task, recorder).go()
    except WorkerError as error:
        recorder.error({**error.as_dict(), **({"needs_launch": True} if error.needs_launch else {})})
        print(error.text, file=sys.stderr, flush=True)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - not a mistake of the user: a lost peer, no memory left, or an error of homelab
        where = f"step {recorder.step + 1}, rank {task.rank} on {task.node}"
        recorder.error({"message": first_words(error), "where": where, "hint": ""})
        traceback.print_exc()
        return EXIT_FAILED
    return 0


def _prepare_imports(task: Task) -> None:
    eight_bit = task.train.optimizer != "adamw"
    by_unsloth = task.method.backend == "unsloth"
    imports.prepare(task.run, bitsandbytes=by_unsloth or eight_bit or task.method.quantisation is not None, unsloth=by_unsloth)


def without_odd_variables(environment: MutableMapping[str, str]) -> list[str]:
    """Take out what the node itself sets and what would make its ranks compute something else than the others'; the names of these variables.

    A plan never sets one of them: files that name one are refused. Before torch is imported.
    """
    odd = influences.of_a_node(environment)
    for name in odd:
        del environment[name]
    return odd
