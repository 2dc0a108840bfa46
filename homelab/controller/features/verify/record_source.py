"""The record and the model card of a run, from the node that has them; and the state of its kept checkpoints on all nodes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.features.recover.replicas import ResumePoint
from homelab.controller.features.results import fetch
from homelab.controller.features.verify.step_record import StepRecord
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import run_folder
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import chain, checkpoint_copies, layout, manifest, result_files
from homelab.shared.protocol.checkpoint_messages import CheckpointRequest
from homelab.shared.protocol.result_messages import PartRequest

_PIECE_BYTES = 8 << 20
_MOST_RECORD_BYTES = 1 << 30
_MOST_CARD_BYTES = 8 << 20


@dataclass(frozen=True)
class Source:
    """`card_end`: the end of the chain in the model card, "" where the run has none yet. `least_steps`: of which a node has a checkpoint."""

    record: StepRecord
    node: str
    card_end: str
    least_steps: int


def read(fleet: Fleet, paths: RunPaths, say: Say) -> Source:
    """The record of the finished run, else that of its newest checkpoint. Raises HomelabError where no node that answers has one."""
    say("reading the record of the run")
    results, errors = fetch.results_of(fleet, paths)
    newest = max((step for result in results.values() for step in result.steps), default=0)
    for name in (name for name, result in results.items() if result.final):
        text = whole_file(fleet, paths.name, name, layout.FINAL, chain.RECORD, _MOST_RECORD_BYTES)
        if text:
            card = whole_file(fleet, paths.name, name, layout.FINAL, result_files.CARD, _MOST_CARD_BYTES)
            return Source(StepRecord(text), name, chain.of_card(card), newest)
    for name in (name for name, result in results.items() if newest and newest in result.steps):
        text = whole_file(fleet, paths.name, name, f"{layout.CHECKPOINTS}/{manifest.folder_name(newest)}", chain.RECORD, _MOST_RECORD_BYTES)
        if text:
            return Source(StepRecord(text), name, "", newest)
    if errors and not any(result.final or result.steps for result in results.values()):
        raise next(iter(errors.values()))
    raise HomelabError(
        "this run has no record: it has saved no checkpoint yet, or an older homelab has trained it", where=paths.name,
        hint=Hint("{} shows how far it is", homelab("status", paths.name)),
    )  # fmt: skip


def whole_file(fleet: Fleet, run: str, node: str, folder: str, name: str, most_bytes: int) -> str:
    """A text file of a result; "" where the node does not have it. Raises UnreachableError where it does not answer, HomelabError for a longer file."""
    out = io.BytesIO()
    while out.tell() < most_bytes:
        have = out.tell()
        request = PartRequest(run=run, folder=folder, name=name, offset=have, count=_PIECE_BYTES)
        try:
            fleet.agent(node).fetch("result-part", request, out, most_bytes=_PIECE_BYTES)
        except UnreachableError:
            raise
        except HomelabError:
            return ""
        if out.tell() - have < _PIECE_BYTES:
            return out.getvalue().decode("utf-8", "replace")
    raise HomelabError(f"{name} has more than {most_bytes >> 20} MiB", where=f"node {node}: {folder}", hint=homelab("logs", run))


@dataclass(frozen=True)
class KeptHolders:
    """A kept checkpoint on the nodes: who has the one of the record, who has another one of this step, and which nodes of the run do not say."""

    point: ResumePoint
    others: Sequence[str] = field(default_factory=tuple)
    silent: Sequence[str] = field(default_factory=tuple)


def kept(fleet: Fleet, paths: RunPaths, step: int, sha256: str) -> KeptHolders:
    """Which nodes hold the checkpoint whose state the record names. Its bytes are verified by the ranks that load it."""
    answers, _ = fleet.ask("manifest", CheckpointRequest(run=paths.name, step=step))
    files: Mapping[str, Mapping[str, str]] = {name: answer["files"] for name, answer in answers.items() if answer["files"]}
    holders = [name for name in files if checkpoint_copies.state_digest(files[name]) == sha256]
    state = {name: digest for name, digest in files[holders[0]].items() if name in checkpoint_copies.STATE} if holders else {}
    sizes = {name: sum(map(int, answers[name]["sizes"].values())) for name in holders}
    silent = tuple(node.name for node in run_folder.plan_of(paths).nodes if node.name not in answers)
    return KeptHolders(ResumePoint(step, holders, sha256, state, sizes=sizes), tuple(name for name in files if name not in holders), silent)
