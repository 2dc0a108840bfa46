"""A checkpoint on its way to the nodes that go on with it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence

from homelab.control.recovery.replicas import ResumePoint
from homelab.errors import HomelabError
from homelab.protocol import checkpoint_holders
from homelab.protocol.checkpoint_holders import Copy
from homelab.remote.fanout import Fleet, on_all
from homelab.runs import store
from homelab.runs.paths import RunPaths
from homelab.text.hint import Hint, homelab

_TIMEOUT_S = 4 * 3600.0  # a full fine-tune's checkpoint has tens of GB; a node that falls silent meanwhile is noticed by itself


def bring(fleet: Fleet, paths: RunPaths, checkpoint: ResumePoint, names: Sequence[str], say: Callable[[str], None], *, to_all: bool) -> None:
    """Make sure that one of the nodes `names` holds the checkpoint whole: the ranks bring it to the others among themselves, over the LAN.

    Where only another node holds it, the first of `names` receives it by way of this machine. `to_all` (for a [script], whose program
    knows nothing of that): every node that lacks it receives it. Which is decided by `checkpoint_holders`. Raises HomelabError, also
    where shards would have to be moved: the nodes that have them are needed.
    """
    moves = checkpoint_holders.copies(checkpoint.held, names, to_all=to_all)
    if not moves:
        return
    if checkpoint.shards:
        raise _not_moved(paths.name, checkpoint.step, moves)
    source, targets = moves[0].source, [move.target for move in moves]
    say(f"bringing checkpoint {checkpoint.step} from {source} to {', '.join(targets)}")
    request = {"run": paths.name, "step": checkpoint.step, "files": dict(checkpoint.files)}
    # In the run's folder: the one for temporary files is often in memory.
    with store.written(paths.root / ".checkpoint"), tempfile.NamedTemporaryFile(prefix=".checkpoint-", dir=paths.root) as archive:
        fleet.agent(source).fetch("send-checkpoint", request, archive, timeout_s=_TIMEOUT_S)  # type: ignore[arg-type]
        archive.flush()

        def send(name: str) -> None:
            with open(archive.name, "rb") as stream:
                fleet.agent(name).send("receive-checkpoint", request, stream, timeout_s=_TIMEOUT_S)

        _, errors = on_all(targets, send)
    for error in errors.values():
        raise error


def _not_moved(run: str, step: int, moves: Sequence[Copy[str]]) -> HomelabError:
    """Shards of a checkpoint that only nodes outside of the plan have."""
    sources = list(dict.fromkeys(move.source for move in moves))
    parts = sorted({move.part for move in moves})
    return HomelabError(
        f"{', '.join(sources)} cannot be left out: no node of the plan has shard {', '.join(map(str, parts))} of checkpoint {step}",
        where=run,
        hint=Hint("make {} well ({}), and let it take part: {}", ", ".join(sources), homelab("preflight"), homelab("recover", run)),
    )
