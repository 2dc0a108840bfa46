"""The diagnosis that a run keeps of each attempt that failed: for later, when its nodes may not answer, or have been stopped."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pydantic import ValidationError

from homelab.diagnose.cause import Diagnosis
from homelab.planning.model import Frozen
from homelab.runs import store
from homelab.runs.paths import RunPaths


class Kept(Frozen):
    """`attempts/<n>/diagnosis.json`. `made_at` is the controller's clock; `unreachable` maps the nodes that could not be asked to why."""

    attempt: int
    made_at: float
    unreachable: dict[str, str]
    diagnosis: Diagnosis

    @property
    def doubt(self) -> tuple[bool, int]:
        """Of two diagnoses of the same attempt the one with less is taken."""
        return not self.diagnosis.names_a_reason, len(self.unreachable)


def keep(paths: RunPaths, attempt: int, diagnosis: Diagnosis, unreachable: Mapping[str, str]) -> Kept:
    """Write it down, unless what was written before knows more; what is kept in the end.

    Looked at too early an attempt shows only who lost a peer, and later its nodes may be off.
    """
    new = Kept(attempt=attempt, made_at=time.time(), unreachable=dict(unreachable), diagnosis=diagnosis)
    old = read(paths, attempt)
    if old is not None and (old.doubt < new.doubt or old.model_copy(update={"made_at": new.made_at}) == new):
        return old
    store.write_json(paths.diagnosis_json(attempt), new.model_dump(mode="json"))
    return new


def read(paths: RunPaths, attempt: int) -> Kept | None:
    """What was kept; None when nothing was, or the file is damaged."""
    try:
        return Kept.model_validate(store.read_json(paths.diagnosis_json(attempt)))
    except ValidationError:
        return None
