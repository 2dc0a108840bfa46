"""The supervision of a run until its end: under the run's lock, and beyond a fault of the supervisor itself."""

from __future__ import annotations

import time
import traceback

from homelab.controller.base import redact
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import homelab
from homelab.controller.base.sanitize import plain_lines
from homelab.controller.base.say import Say
from homelab.controller.config.cluster import Cluster
from homelab.controller.features.supervise import notifier
from homelab.controller.features.supervise.supervisor import Supervisor
from homelab.controller.run import event_log, supervisor_lock
from homelab.controller.run.events import note
from homelab.controller.run.paths import RunPaths

AGAIN_S = 1.0  # ten times of it after the second fault
_LOCK_S = 1.0  # a process that only asks for the lock has it for an instant
# A fault that is there whenever this run is looked at would come again for ever.
_MOST_FAULTS, _WITHIN_S = 3, 600.0


def supervise(cluster: Cluster, paths: RunPaths, say: Say) -> str | None:
    """Supervise a run until its end; None when another process does already. Raises what ended the supervisor three times in ten minutes."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        with supervisor_lock.held(paths) as is_ours:
            if is_ours:
                return _until_its_end(cluster, paths, say)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)


def _until_its_end(cluster: Cluster, paths: RunPaths, say: Say) -> str:
    """A supervisor knows nothing that is not on disk: after a fault of its own, a new one goes on where it was. The lock stays ours meanwhile."""
    faults_s: list[float] = []
    # What is wrong with the run's folder from the beginning is no fault of ours.
    supervisor: Supervisor | None = Supervisor(cluster, paths, say)
    while True:
        try:
            supervisor = supervisor or Supervisor(cluster, paths, say)
            return supervisor.run()
        except Exception as error:  # whatever it is, a run that nobody looks after is worse
            supervisor = None
            is_ours = not isinstance(error, HomelabError)  # else it says itself what is wrong on this machine, and the fix
            say(traceback.format_exc().rstrip() if is_ours else str(error))
            words = error.message if isinstance(error, HomelabError) else traceback.format_exception_only(error)[-1].strip()
            what = redact.text(plain_lines(words))[:300]
            now_s = time.monotonic()
            faults_s = [at_s for at_s in faults_s if now_s - at_s < _WITHIN_S] + [now_s]
            if len(faults_s) >= _MOST_FAULTS:
                event_log.append(paths, note(f"the supervisor has ended by a fault of its own: {what}"))
                told, another = notifier.of_run(cluster.notify, paths, say), homelab("supervise", paths.name)
                ended = f"its supervisor has ended by a fault of its own: {what}\nNobody looks after the run now; to start another supervisor: {another}"
                told.tell("needs you", ended)
                told.close()
                raise
            event_log.append(paths, note(f"the supervisor met a fault of its own and began again: {what}"))
            time.sleep(AGAIN_S * 10 ** (len(faults_s) - 1))
