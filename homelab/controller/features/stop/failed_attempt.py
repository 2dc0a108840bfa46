"""The rest of an attempt that has failed, of a run that is without a supervisor by its owner's word: the command that waits for it ends it."""

from __future__ import annotations

from contextlib import suppress

from homelab.controller.attempt import start
from homelab.controller.base.errors import StoppedError, SupersededError, TakenError
from homelab.controller.features.status import monitor
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import claims, ownership, run_folder, supervisor_lock
from homelab.controller.run.paths import RunPaths


def end_rest(fleet: Fleet, paths: RunPaths) -> list[str]:
    """Nothing is done where somebody else owns the run, or has gone on with it. The nodes on which something may be left."""
    with suppress(TakenError, StoppedError, SupersededError), supervisor_lock.held(paths) as is_ours:
        watcher = monitor.Watcher(fleet, paths, is_owner=True)
        state, attempt = watcher.look().state, run_folder.plan_of(paths).attempt
        if not is_ours or not ownership.may_end("starter", state, watcher.owner):
            return []
        names = [node.name for node in run_folder.plan_of(paths).nodes if node.name not in watcher.unreachable]
        with claims.claimed(fleet, paths.name, names, "ended after its failure", after=attempt) as claim:
            stopped, errors = start.stop_all(fleet, paths.name, names, claim.as_request(), grace_s=3.0)
        return [*(name for name, answer in stopped.items() if answer["left"]), *errors]
    return []
