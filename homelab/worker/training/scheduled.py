"""A rank that a scheduler has started (`homelab export`): it finds by itself which attempt this is, and from which step it goes on.

There is no supervisor. The scheduler starts the same command again after a fault, perhaps on other machines, and all of them see one folder,
HOMELAB_JOB. Rank 0 writes the plan of the next attempt there, with the newest complete checkpoint; the others learn its number over torchrun's
store. The plan that it is made from stands in the place of attempt 0.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from homelab.shared.protocol import files, layout
from homelab.worker.checkpoints import checkpoint_folder, fencing
from homelab.worker.errors import WorkerError

if TYPE_CHECKING:
    import torch.distributed as dist

JOB = "HOMELAB_JOB"
_stores: list[dist.Store] = []  # a client that is closed while another rank still asks would end that one
_SEEN_S = 120.0  # a network file system shows other machines' new files after up to a minute (nfs(5): acdirmax)


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """HOMELAB_RUN_DIR, HOMELAB_ATTEMPT and HOMELAB_NODE of this rank; none where no scheduler has started it.

    Raises WorkerError where the folder is not the one that was exported.
    """
    if not environment.get(JOB):
        return {}
    run_dir = Path(environment[JOB]) / layout.run(environment.get("HOMELAB_RUN", ""))
    rank, size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    attempt = next_attempt(run_dir) if rank == 0 else 0
    if size > 1:
        attempt = _agreed(attempt, is_first=rank == 0)
    _wait_for(run_dir / layout.plan_json(attempt))
    # GROUP_RANK: torchrun's number of the machine.
    return {"HOMELAB_RUN_DIR": str(run_dir), "HOMELAB_ATTEMPT": str(attempt), "HOMELAB_NODE": f"node-{environment.get('GROUP_RANK', '0')}"}


def next_attempt(run_dir: Path) -> int:
    """Write the plan of the attempt after the newest one, from the newest complete checkpoint; its number.

    A rank of an earlier attempt that still runs somewhere writes nothing more then (`fencing`). Raises WorkerError.
    """
    first = run_dir / layout.plan_json(0)
    plan = files.read_object(first)
    if plan is None:
        hint = "the folder must be complete, and at the path of `homelab export --at`: copy it again, or export again"
        raise WorkerError("the plan of the exported job cannot be read", where=str(first), hint=hint)
    attempt = fencing.newest_attempt(run_dir) + 1
    while True:
        try:
            (run_dir / layout.attempt(attempt)).mkdir(parents=True)
            break
        except FileExistsError:  # a start that ended before it had a plan, or one at the same moment
            attempt += 1
        except OSError as error:
            raise WorkerError(
                f"the job's folder cannot be written: {error.strerror}",
                where=str(run_dir),
                hint=f"make it writable for this user: ls -ld {shlex.quote(str(run_dir))}",
            ) from error
    step = max(checkpoint_folder.complete_steps(run_dir / layout.CHECKPOINTS), default=0)
    files.write_json(run_dir / layout.plan_json(attempt), {**plan, "attempt": attempt, "resume_step": step})
    print(f"homelab: attempt {attempt}, from {f'the checkpoint of step {step}' if step else 'the beginning'}", flush=True)
    return attempt


def _agreed(attempt: int, *, is_first: bool) -> int:
    """The attempt's number, from rank 0 to all."""
    import torch.distributed as dist

    from homelab.worker.runtime import process_group

    store = next(iter(dist.rendezvous("env://", timeout=process_group.silence())))[0]
    _stores.append(store)
    if is_first:
        store.set("homelab/attempt", str(attempt))
    return int(store.get("homelab/attempt"))


def _wait_for(plan: Path) -> None:
    deadline_s = time.monotonic() + _SEEN_S
    while files.read_object(plan) is None:
        if time.monotonic() > deadline_s:
            raise WorkerError(
                f"the plan of rank 0 did not appear here within {_SEEN_S:.0f} s", where=str(plan),
                hint="every machine of the job needs the same folder: mount it, or name another one: homelab export --at",
            )  # fmt: skip
        time.sleep(0.1)
