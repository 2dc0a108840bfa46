"""The diagnosis of a run, and what is kept of it for each attempt that failed: later its nodes may not answer, or have been stopped."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import ValidationError

from homelab.config.cluster import Cluster
from homelab.control import neighbours
from homelab.diagnose import cause, endings, shipped
from homelab.diagnose.cause import Diagnosis
from homelab.planning.model import Frozen
from homelab.runs import store
from homelab.runs.paths import RunPaths
from homelab.runs.reply import Reply


class Kept(Frozen):
    """`attempts/<n>/diagnosis.json`. `made_at` is the controller's clock; `unreachable` maps the nodes that could not be asked to why."""

    attempt: int
    made_at: float
    unreachable: dict[str, str]
    diagnosis: Diagnosis

    @property
    def doubt(self) -> tuple[bool, bool, int]:
        """Of two diagnoses of the same attempt the one with less is taken. A node that let go because it heard nobody only came after."""
        return not self.diagnosis.names_a_reason, self.diagnosis.cause == endings.ALONE.id, len(self.unreachable)


def make(
    cluster: Cluster, paths: RunPaths, replies: Mapping[str, Reply], unreachable: Mapping[str, str], *,
    silent_ranks: Collection[int] = (), options: str = "",
) -> Diagnosis | None:  # fmt: skip
    """`homelab.diagnose.cause.diagnose`, told how its commands reach the nodes, and which files of this machine were shipped."""
    described = store.read_object(paths.run_json)
    own = shipped.of_run(described)
    script = shipped.script_of(described)
    near = neighbours.modules_near(Path(script)) if script else {}
    nodes = {node.name: node for node in cluster.nodes}
    return cause.diagnose(paths.name, replies, unreachable, nodes=nodes, own_files=own, near=near, silent_ranks=silent_ranks, options=options)


def keep(paths: RunPaths, attempt: int, diagnosis: Diagnosis, unreachable: Mapping[str, str]) -> Kept:
    """Write it down, unless what was written before knows more; what is kept in the end.

    Looked at too early an attempt shows only who lost a peer, and later its nodes may be off.
    """
    new = Kept(attempt=attempt, made_at=time.time(), unreachable=dict(unreachable), diagnosis=diagnosis)
    old = read(paths, attempt)
    if old is not None and (old.doubt < new.doubt or old.model_copy(update={"made_at": new.made_at}) == new):
        return old
    with store.told(paths.diagnosis_json(attempt)):
        store.write_json(paths.diagnosis_json(attempt), new.model_dump(mode="json"))
    return new


def read(paths: RunPaths, attempt: int) -> Kept | None:
    """What was kept; None when nothing was, or the file is damaged."""
    try:
        return Kept.model_validate(store.read_json(paths.diagnosis_json(attempt)))
    except ValidationError:
        return None
