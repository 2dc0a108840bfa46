"""Checks before the first step that all ranks train on the same rows, and on those that the run began with, to the last token.

The inputs are compared earlier: a file by its bytes (readers.py), a data set of the hub by its commit (hub.py). This module compares the
result: another tokenizer, chat template or library version makes other rows of the same file.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from homelab.shared.protocol import checkpoint_copies
from homelab.worker.data import hub
from homelab.worker.data.rows import EncodedData, Row
from homelab.worker.errors import TrainingError
from homelab.worker.runtime import process_group
from homelab.worker.runtime.task import Task

LAW = "law.json"  # of a checkpoint: what the training is made of (weights.py)
ROLES = ("train", "eval")


def of(data: EncodedData) -> dict[str, dict[str, str]]:
    """Role -> {"sha256" of its rows, "commit" of the hub or empty}; the form in which a checkpoint carries it."""
    rows = {"train": data.train, "eval": data.held_out}
    return {role: {"sha256": digest(rows[role]), "commit": data.commits.get(role, "")} for role in ROLES}


def digest(rows: Iterable[Row]) -> str:
    """sha256 of the rows in their order: tokens, which of them are trained, and where samples begin in a packed row."""
    hasher = hashlib.sha256()
    for row in rows:
        hasher.update(array("q", (len(row.tokens), len(row.starts), *row.starts)))
        hasher.update(row.tokens)
        hasher.update(row.trained)
        if not row.good:  # a good one is as a row without a label: older digests stay
            hasher.update(b"bad")
    return hasher.hexdigest()


def refuse_other(own_digests: Mapping[str, Mapping[str, str]], task: Task, resume: Path | None) -> None:
    """Raises TrainingError, the same on every rank, where a rank's rows are not those of the others, or of the checkpoint `resume`.

    Collective. `own_digests`: as `of` gives it. A checkpoint that says nothing of its rows is accepted.
    """
    began = _began_with(resume)
    numbers = [
        number
        for role in ROLES
        for number in (*checkpoint_copies.numbers(own_digests[role]["sha256"]), *checkpoint_copies.numbers(own_digests[role]["commit"]))
    ]
    everyone = process_group.gather(numbers)
    for place, role in enumerate(ROLES):
        start, width = 2 * place * checkpoint_copies.NUMBERS, checkpoint_copies.NUMBERS
        digests = {rank: str(entry[start : start + width]) for rank, entry in enumerate(everyone)}
        commits = {rank: _commit(entry[start + width : start + 2 * width]) for rank, entry in enumerate(everyone)}
        before = began.get(role)
        right = str(checkpoint_copies.numbers(before["sha256"])) if before else checkpoint_copies.right(digests)
        odd = [rank for rank, entry in digests.items() if entry != right]
        if before and len(odd) == len(digests):
            raise _changed(task, role, commits[0], before["commit"])
        if odd:
            raise _unequal(task, role, odd, commits)


def _began_with(resume: Path | None) -> dict[str, dict[str, str]]:
    """The digests and commits of the checkpoint's rows; empty for a checkpoint without them."""
    if resume is None:
        return {}
    try:
        rows = json.loads((resume / LAW).read_text(encoding="utf-8"))["rows"]
        return {role: {key: str(rows[role][key]) for key in ("sha256", "commit")} for role in ROLES}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _changed(task: Task, role: str, now: str, before: str) -> TrainingError:
    """The error for ranks that agree on rows with which the run did not begin."""
    where = _named(task, role)
    new = "launch it as a new run"
    if now != before[: 6 * checkpoint_copies.NUMBERS]:
        where += f": revision {now[:12] or 'not known'} now, and {before[:12] or 'not known'} when this run began"
        back = f' with [data] revision = "{before}" to train on the old rows' if before else ""
        return TrainingError(
            f"this data set was changed since the run began: its {role} rows are different", where=where,
            hint=f"changed data is a new training: {new}{back}",
        )  # fmt: skip
    return TrainingError(
        f"the {role} rows differ from those at the beginning of this run, although the data is the same", where=where,
        hint=f"the tokenizer, its chat template or a library has changed: restore it on every node, then homelab recover"
        f" {task.run_dir.name}; or {new}",
    )  # fmt: skip


def _unequal(task: Task, role: str, odd: Sequence[int], commits: Mapping[int, str]) -> TrainingError:
    """The error for ranks that would train on other rows than the others."""
    nodes = task.nodes
    others = [rank for rank in commits if rank not in odd]
    odd_commits, usual = sorted({commits[rank] for rank in odd}), commits[others[0]]
    where = _named(task, role)
    names = ", ".join(sorted({nodes[rank] for rank in odd}))
    if odd_commits != [usual]:
        where += f": revision {', '.join(commit[:12] or 'not known' for commit in odd_commits)} on {names}, {usual[:12] or 'not known'} on {nodes[others[0]]}"
        hint = f"let {names} reach the hub, then homelab recover {task.run_dir.name}; or leave it out with --nodes"
    else:
        hint = f"homelab preflight RECIPE compares tokenizer and packages of the nodes; copy the model's folder to {names} again, then homelab recover {task.run_dir.name}"
    listed = [task.named(*ranks) for ranks in (odd, others)]
    return TrainingError(
        f"the ranks do not have the same {role} rows: {listed[0]} has different ones from {listed[1]}", where=where, hint=hint
    )


def _named(task: Task, role: str) -> str:
    source = task.run["data"].get(role) or task.run["data"]["train"]  # held out of the training file
    if source["kind"] != "hub":
        return str(source["path"])
    return hub.named({"split": task.data.split, **source})


def _commit(numbers: Sequence[float]) -> str:
    """The first 24 digits of the commit that `checkpoint_copies.numbers` made these of; empty for none."""
    return "".join(f"{int(number):06x}" for number in numbers) if any(numbers) else ""
