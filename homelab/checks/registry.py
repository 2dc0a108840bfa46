"""All checks, in the order in which they are shown and in which it pays to mend what they find."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from homelab.checks import clock, collective, data, disk, fit, gpu, memory, model, network, power, python, runs, ssh
from homelab.checks.check import Check, Subject
from homelab.checks.evidence import Evidence, Finding
from homelab.errors import InputError, did_you_mean

SKIPPED = "skipped by --skip or --only"

SUBJECTS: tuple[Subject, ...] = (
    ssh.SUBJECT, clock.SUBJECT, python.SUBJECT, gpu.SUBJECT, network.SUBJECT, disk.SUBJECT, memory.SUBJECT, model.SUBJECT,
    data.SUBJECT, power.SUBJECT, runs.SUBJECT, collective.SUBJECT, fit.SUBJECT,
)  # fmt: skip
CHECKS: tuple[Check, ...] = tuple(check for subject in SUBJECTS for check in subject.checks)
# What --only and --skip take: a whole subject, or one check of it.
IDS: tuple[str, ...] = tuple(name for subject in SUBJECTS for name in (subject.id, *(check.id for check in subject.checks)))


def skipped(*, only: Collection[str], skip: Collection[str]) -> frozenset[str]:
    """The ids of the checks that are not judged. Raises InputError for an unknown id, and when nothing is left to judge."""
    _refuse_unknown(only, "--only")
    _refuse_unknown(skip, "--skip")
    left_out = frozenset(
        check.id for check in CHECKS if _names(skip, check) or (only and not _names(only, check))
    )
    if len(left_out) == len(CHECKS):
        raise InputError(
            "every check is skipped",
            where="--only and --skip",
            hint=f"leave out some of: {', '.join(subject.id for subject in SUBJECTS)}",
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


def _judge_subject(subject: Subject, evidence: Evidence, skip: Collection[str]) -> Iterator[Finding]:
    wanted = [check for check in subject.checks if not _names(skip, check)]
    if not wanted:
        yield Finding(subject.id, "", "ok", SKIPPED)
        if subject.id == ssh.SUBJECT.id:
            yield from ssh.LOGIN.judge(evidence)
        return
    missing = subject.needs(evidence)
    if missing is not None:
        yield Finding(subject.id, "", "ok", missing)
        return
    for check in subject.checks:
        if check not in wanted:
            yield Finding(check.id, "", "ok", SKIPPED)
            if check is ssh.LOGIN:
                yield from check.judge(evidence)
    found = [finding for check in wanted for finding in judge_one(check, evidence)]
    found.sort(key=lambda finding: finding.level != "fail")  # stable: the most pressing thing of each cell comes first
    if subject.id == ssh.SUBJECT.id:  # where no node is reached, this machine comes first
        yield from (finding for finding in found if not finding.node)
        found = [finding for finding in found if finding.node]
    troubled = {finding.node for finding in found}
    for node in evidence.cluster.nodes:
        yield from (finding for finding in found if finding.node == node.name)
        facts = evidence.facts.get(node.name)
        if node.name not in troubled and facts is not None:
            yield _summary(subject, evidence, node.name)
    yield from (finding for finding in found if not finding.node)


def _summary(subject: Subject, evidence: Evidence, name: str) -> Finding:
    try:
        text = subject.summary(evidence, evidence.cluster.node(name), evidence.facts[name])
    except Exception as error:  # a summary is not worth a traceback either
        text = f"not known ({type(error).__name__}: {error})"
    return Finding(subject.id, name, "ok", text)


def judge_one(check: Check, evidence: Evidence) -> list[Finding]:
    """One check's findings; those it made before it broke are kept."""
    findings: list[Finding] = []
    try:
        for finding in check.judge(evidence):
            assert finding.level != "ok" and finding.hint, finding
            findings.append(finding)
    except Exception as error:  # a fault of ours must not hide what the other checks have found
        message = f"this check broke: {type(error).__name__}: {error}"
        hint = f"homelab preflight --skip {check.id}; please report it with: homelab preflight --json"
        findings.append(Finding(check.id, "", "fail", message, hint))
    return findings


def _names(names: Collection[str], check: Check) -> bool:
    return check.id in names or check.subject in names


def _refuse_unknown(names: Collection[str], option: str) -> None:
    for name in names:
        if name not in IDS:
            subject = next((subject for subject in SUBJECTS if subject.id == name.partition(".")[0]), None)
            known = [check.id for check in subject.checks] if subject else [subject.id for subject in SUBJECTS]
            raise InputError(
                f'there is no check "{name}".{did_you_mean(name, IDS)}',
                where=f"{option} {name}",
                hint=f"use one of: {', '.join(known)}",
            )
