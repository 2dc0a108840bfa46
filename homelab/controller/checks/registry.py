"""All checks, in the order in which they are shown and in which it pays to fix what they find.

Every file of a sub-room of homelab/controller/checks is imported; its declarations with `@check` and `@subject` make this list.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Iterator
from dataclasses import replace

from homelab.controller import checks
from homelab.controller.base.errors import InputError, did_you_mean
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.checks.check import DECLARED_CHECKS, DECLARED_SUBJECTS, Check, Subject, in_order
from homelab.controller.checks.evidence import Evidence, Finding

SKIPPED = "skipped by --skip or --only"


def _discovered() -> tuple[Subject, ...]:
    """All subjects with their checks. Raises ValueError for a check whose subject or place nobody declares, and for an id declared twice."""
    for room in pkgutil.iter_modules(checks.__path__, f"{checks.__name__}."):
        if room.ispkg:
            for file in pkgutil.iter_modules(importlib.import_module(room.name).__path__, f"{room.name}."):
                importlib.import_module(file.name)
    subjects = tuple(
        replace(subject, checks=tuple(in_order([check for check in DECLARED_CHECKS if check.subject == subject.id])))
        for subject in in_order(DECLARED_SUBJECTS)
    )
    declared, placed = [check.id for check in DECLARED_CHECKS], [check.id for subject in subjects for check in subject.checks]
    if sorted(declared) != sorted(set(placed)):
        raise ValueError(f"declared twice, without a subject, or in a circle: {sorted(declared)} are not {sorted(placed)}")
    return subjects


SUBJECTS = _discovered()
CHECKS: tuple[Check, ...] = tuple(check for subject in SUBJECTS for check in subject.checks)
# What --only and --skip take: a whole subject, or one check of it.
IDS: tuple[str, ...] = tuple(name for subject in SUBJECTS for name in (subject.id, *(check.id for check in subject.checks)))


def subject(id: str) -> Subject:
    """The subject with this id. Raises KeyError where there is none."""
    return {subject.id: subject for subject in SUBJECTS}[id]


def skipped(*, only: Collection[str], skip: Collection[str]) -> frozenset[str]:
    """The ids of the checks that are not judged. Raises InputError for an unknown id, and when nothing is left to judge."""
    _refuse_unknown(only, "--only")
    _refuse_unknown(skip, "--skip")
    left_out = frozenset(check.id for check in CHECKS if check.is_among(skip) or (only and not check.is_among(only)))
    if len(left_out) == len(CHECKS):
        raise InputError(
            "every check is skipped", where="--only and --skip", hint=f"leave out some of: {', '.join(subject.id for subject in SUBJECTS)}"
        )
    return left_out


def judge_all(evidence: Evidence, skip: Collection[str] = ()) -> list[Finding]:
    """The findings of all checks: one "ok" for each node and subject where nothing is wrong, and everything that is.

    What is skipped says so in one "ok" finding, so that it is never silent. A node that gave no facts is a fail even where
    the login check is skipped: nothing was judged there, and nothing must look as if it had been. A check that breaks is a fail
    of its own, never a traceback. Raises InputError for an unknown id.
    """
    _refuse_unknown(skip, "--skip")
    findings: list[Finding] = []
    for subject in SUBJECTS:
        findings += _judge_subject(subject, evidence, skip)
    return findings


def is_certain(id: str) -> bool:
    """Whether what this check finds ends every launch: to skip it does not help."""
    return any(check.is_certain for check in CHECKS if check.id == id)


def _judge_subject(subject: Subject, evidence: Evidence, skip: Collection[str]) -> Iterator[Finding]:
    judged = [check for check in subject.checks if not check.is_among(skip)]
    missing = subject.needs(evidence) if judged else SKIPPED
    if missing is not None:
        yield Finding(subject.id, "", "ok", missing)
    for check in subject.checks:
        if check in judged or missing not in (None, SKIPPED):
            continue
        if judged:
            yield Finding(check.id, "", "ok", SKIPPED)
        if check.always:
            yield from check.judge(evidence)
    if missing is not None:
        return
    findings = [finding for check in judged for finding in judge_one(check, evidence)]
    findings.sort(key=lambda finding: finding.level != "fail")  # stable: the most pressing thing of each cell comes first
    of_cluster = [finding for finding in findings if not finding.node]
    if subject.cluster_first:
        yield from of_cluster
    for node in evidence.cluster.nodes:
        of_node = [finding for finding in findings if finding.node == node.name]
        yield from of_node
        if not of_node and node.name in evidence.facts:
            yield _summary(subject, evidence, node.name)
    if not subject.cluster_first:
        yield from of_cluster


def _summary(subject: Subject, evidence: Evidence, name: str) -> Finding:
    try:
        text = subject.summary(evidence, evidence.cluster.node(name), evidence.facts[name])
    except Exception as error:  # noqa: BLE001 - a summary is not worth a traceback either
        text = f"not known ({type(error).__name__}: {error})"
    return Finding(subject.id, name, "ok", text)


def judge_one(check: Check, evidence: Evidence) -> list[Finding]:
    """One check's findings; those it made before it broke are kept."""
    findings: list[Finding] = []
    try:
        for finding in check.judge(evidence):
            assert finding.level != "ok" and finding.hint, finding
            findings.append(finding)
    except Exception as error:  # noqa: BLE001 - a fault of ours must not hide what the other checks have found
        message = f"this check itself failed: {type(error).__name__}: {error}"
        hint = Hint("{}; please report it with: {}", homelab(f"preflight --skip {check.id}"), homelab("preflight --json"))
        findings.append(Finding(check.id, "", "fail", message, hint))
    return findings


def _refuse_unknown(names: Collection[str], option: str) -> None:
    for name in names:
        if name not in IDS:
            subject = next((subject for subject in SUBJECTS if subject.id == name.partition(".")[0]), None)
            ids = [check.id for check in subject.checks] if subject else [subject.id for subject in SUBJECTS]
            raise InputError(
                f'there is no check "{name}".{did_you_mean(name, IDS)}', where=f"{option} {name}", hint=f"use one of: {', '.join(ids)}"
            )
