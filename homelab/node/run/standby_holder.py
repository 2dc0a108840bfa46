"""`python -m homelab.node standby`: holds the processes of an attempt to come, until `standby.take` hands it to them or nobody needs them any more."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.run import attempt_records, rank_launcher, standby, torchrun
from homelab.node.system import boot_clock, control_group, processes
from homelab.shared.protocol import files, layout, waiting_mark

if TYPE_CHECKING:
    import subprocess

    from homelab.shared.protocol.files import JsonObject

_LOOK_S, _GO_LOOK_S = 1.0, 0.02
_UNCLAIMED_S = 180.0
_LEAST_BYTES = 256 << 20


def hold(node_dir: str) -> None:
    """Wait until `standby.take` or an end; then become the next attempt's watcher."""
    plan = files.read_json(os.path.join(node_dir, layout.START_JSON))
    folder = os.environ["HOMELAB_RUN_DIR"]
    environment = {**os.environ, **plan["environment"], **rank_launcher.of_group(plan, folder)}
    with open(os.path.join(node_dir, "standby.log"), "ab") as log:
        ranks = rank_launcher.spawn(folder, log, {"program": plan["program"], "environment": environment, "ranks": plan["ranks"]})
    goes_on = _wait(plan, folder, node_dir, ranks)
    # One that was frozen may hear of an attempt when the run has gone on without it.
    if goes_on is None or goes_on["attempt"] < paths.newest_attempt(folder):
        record = os.path.join(node_dir, standby.RECORD)
        if (files.read_object(record) or {}).get("pid") == os.getpid():
            with contextlib.suppress(OSError):
                os.unlink(record)
        ranks.kill()
        return
    processes.rename(waiting_mark.AT_WORK)
    del os.environ[waiting_mark.VARIABLE]
    os.environ["HOMELAB_ATTEMPT"] = str(goes_on["attempt"])
    os.environ["HOMELAB_NODE"] = goes_on["node"]
    rank_launcher.redirect(os.path.join(goes_on["node_dir"], "agent.log"))
    torchrun.watch(goes_on["node_dir"], ranks)


def _wait(plan: JsonObject, folder: str, node_dir: str, ranks: subprocess.Popen[bytes]) -> JsonObject | None:
    """What `take` says; None where it is time to end."""
    go, alone_s, looked_s = os.path.join(node_dir, standby.GO), 0.0, time.monotonic()
    wanted_ns = _wanted_ns(node_dir)
    while True:
        if os.path.exists(go):
            said = files.read_object(go) or {}
            return said if said.get("pid") == os.getpid() else None  # another one was told
        now_s = time.monotonic()
        if now_s - looked_s >= _LOOK_S:
            passed_s, looked_s = now_s - looked_s, now_s
            if not os.path.isdir(folder) or ranks.poll() is not None or control_group.available_bytes() < _LEAST_BYTES:
                return None
            ended, before_ns = files.read_object(os.path.join(node_dir, layout.EXIT_JSON)), wanted_ns
            wanted_ns = _wanted_ns(node_dir)
            if ended and (ended.get("returncode") == 0 or (ended.get("alone") and not wanted_ns)):
                return None
            if _has_gone_on(folder, plan):
                return None
            agent = attempt_records.agent(node_dir)
            # A killed agent leaves its ranks at work, and nobody begins another holder.
            is_over = ended is not None or agent is None or not _is_at_work(agent)
            alone_s = alone_s + min(passed_s, 2 * _LOOK_S) if is_over and wanted_ns == before_ns else 0.0
            if alone_s > _UNCLAIMED_S:
                return None
        time.sleep(_GO_LOOK_S)


def _is_at_work(agent: JsonObject) -> bool:
    """Whether a process of agent.json lives. After a power cut its numbers belong to others, or to nobody."""
    is_of_this_boot = agent.get("boot_id") in (None, "", boot_clock.boot_id())
    return is_of_this_boot and any(processes.is_alive(agent[name]) for name in ("pid", "torchrun_pid"))


def _wanted_ns(node_dir: str) -> int:
    """When a supervisor asked for it last, by the clock of its disk; 0 where none has."""
    try:
        return os.stat(os.path.join(node_dir, standby.WANTED)).st_mtime_ns
    except OSError:
        return 0


def _has_gone_on(folder: str, plan: JsonObject) -> bool:
    """Whether a later attempt runs here without these processes: they came too late for it."""
    newest = paths.newest_attempt(folder)
    return (
        newest > plan["attempt"]
        and attempt_records.agent(paths.node_dir(folder, newest, paths.name_here(folder, newest, plan["node"]))) is not None
    )
