"""The diagnosis of a run, and what is kept of it for each attempt that failed: later its nodes may not answer, or have been stopped."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from pydantic import ValidationError

from homelab.controller.attempt import preconditions, script_imports
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.models import Value
from homelab.controller.config.cluster import Cluster
from homelab.controller.diagnose import cause, endings
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.run import shipped_files as shipped
from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.state import newest_attempt
from homelab.shared.protocol.run_messages import Reply


class StoredDiagnosis(Value):
    """`attempts/<n>/diagnosis.json`. `made_at` is the controller's clock; `unreachable` maps the nodes that could not be asked to why."""

    attempt: int
    made_at: float
    unreachable: dict[str, str]
    diagnosis: Diagnosis

    @property
    def confidence_key(self) -> tuple[bool, bool, int]:
        """Sort key: of two diagnoses of one attempt the smaller one counts. A node that stopped because it was cut off failed later than the cause."""
        return not self.diagnosis.names_a_reason, self.diagnosis.cause in (endings.ALONE.id, endings.VANISHED.id), len(self.unreachable)

    def outlasts(self, newer: StoredDiagnosis) -> bool:
        """Whether this one stays. That a watcher is gone is a guess at what ended it: it replaces nothing that was known before."""
        is_guess = newer.diagnosis.cause == endings.VANISHED.id and self.diagnosis.cause != endings.VANISHED.id
        return is_guess or self.confidence_key < newer.confidence_key


def make(
    cluster: Cluster, paths: RunPaths, replies: Mapping[str, Reply], unreachable: Mapping[str, str], *,
    silent_ranks: Collection[int] = (), ways: Mapping[str, str] = MappingProxyType({}),
) -> Diagnosis | None:  # fmt: skip
    """`homelab.controller.diagnose.cause.diagnose`, told how its commands reach the nodes, at which addresses the ranks looked for each other,
    and which files of this machine were shipped."""
    described = store.read_object(paths.run_json)
    addresses = _addresses(paths, newest_attempt(replies))
    nodes = {node.name: node.model_copy(update={"lan_address": addresses.get(node.name, node.lan_address)}) for node in cluster.nodes}
    shared_out = [name for name in preconditions.named_in_shares(described) if name not in nodes]
    way = Hint("{}, then: {}", preconditions.ways_of_shares(paths, shared_out), homelab("recover", paths.name))
    script = shipped.script_of(described)
    context = cause.Context(
        nodes=nodes, own_files=shipped.of_run(described), near=script_imports.modules_near(Path(script)) if script else {},
        silent_ranks=silent_ranks, ways={**ways, **dict.fromkeys(shared_out, way)},
    )  # fmt: skip
    return cause.diagnose(paths.name, replies, unreachable, context)


def _addresses(paths: RunPaths, attempt: int) -> dict[str, str]:
    """Node -> its address in the plan of this attempt; none where the plan is damaged."""
    entries = store.read_object(paths.plan_json(attempt)).get("nodes")
    named = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return {
        entry["name"]: entry["lan_address"]
        for entry in named
        if isinstance(entry.get("name"), str) and isinstance(entry.get("lan_address"), str)
    }


def better(paths: RunPaths, attempt: int, diagnosis: Diagnosis, unreachable: Mapping[str, str]) -> StoredDiagnosis:
    """What was kept where it knows more, or says the same, else this one; nothing is written."""
    new = StoredDiagnosis(attempt=attempt, made_at=time.time(), unreachable=dict(unreachable), diagnosis=diagnosis)
    old = read(paths, attempt)
    return old if old is not None and (old.outlasts(new) or old.model_copy(update={"made_at": new.made_at}) == new) else new


def keep(paths: RunPaths, attempt: int, diagnosis: Diagnosis, unreachable: Mapping[str, str]) -> StoredDiagnosis:
    """Write it down, unless what was written before knows more; what is kept in the end.

    Looked at too early an attempt shows only who lost a peer, and later its nodes may be off.
    """
    kept = better(paths, attempt, diagnosis, unreachable)
    if kept != read(paths, attempt):
        with store.best_effort_write(paths.diagnosis_json(attempt)):
            store.write_json(paths.diagnosis_json(attempt), kept.model_dump(mode="json"))
    return kept


def read(paths: RunPaths, attempt: int) -> StoredDiagnosis | None:
    """What was kept; None when nothing was, or the file is damaged."""
    try:
        return StoredDiagnosis.model_validate(store.read_json(paths.diagnosis_json(attempt)))
    except ValidationError:
        return None
