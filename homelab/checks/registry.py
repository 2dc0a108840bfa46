"""All checks, in the order in which they are shown and in which it pays to mend what they find."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from homelab.checks import clock, data, disk, gpu, memory, model, network, power, python, runs, ssh
from homelab.checks.evidence import Evidence, Finding
from homelab.errors import InputError, did_you_mean

SKIPPED = "skipped by --skip or --only"


@dataclass(frozen=True)
class Check:
    """One subject: `judge` is pure, and yields findings with this id."""

    id: str
    title: str
    judge: Callable[[Evidence], Iterable[Finding]]


CHECKS: tuple[Check, ...] = (
    Check(ssh.ID, "the node lets us in, and answers", ssh.judge),
    Check(clock.ID, "all machines agree on the time", clock.judge),
    Check(python.ID, "the worker's Python and packages, the same on all nodes", python.judge),
    Check(gpu.ID, "the cards of cluster.toml, free, and torch computes on them", gpu.judge),
    Check(network.ID, "addresses on the LAN, connections between all nodes, the rendezvous port", network.judge),
    Check(disk.ID, "the workdir can be written and holds the checkpoints", disk.judge),
    Check(memory.ID, "RAM to load the model", memory.judge),
    Check(model.ID, "the base model, whole and the same on all nodes", model.judge),
    Check(data.ID, "data files that lie on the nodes, the same on all", data.judge),
    Check(power.ID, "no laptop on battery", power.judge),
    Check(runs.ID, "no other run is alive", runs.judge),
)
IDS: tuple[str, ...] = tuple(check.id for check in CHECKS)


def skipped(*, only: Collection[str], skip: Collection[str]) -> frozenset[str]:
    """The ids that are not judged. Raises InputError for an unknown id, and when nothing is left to judge."""
    _refuse_unknown(only, "--only")
    _refuse_unknown(skip, "--skip")
    left_out = frozenset(skip) | (frozenset(IDS) - frozenset(only) if only else frozenset())
    if len(left_out) == len(IDS):
        raise InputError(
            "every check is skipped", where="--only and --skip", hint=f"leave out some of: {', '.join(IDS)}"
        )
    return left_out


def judge_all(evidence: Evidence, skip: Collection[str] = ()) -> list[Finding]:
    """The findings of all checks. A skipped one says so in one "ok" finding, so that it is never silent.

    A node that gave no facts is a fail even where the ssh check is skipped: nothing was judged there, and nothing must look
    as if it had been. A check that breaks is a fail of its own, never a traceback. Raises InputError for an unknown id.
    """
    _refuse_unknown(skip, "--skip")
    findings: list[Finding] = []
    for check in CHECKS:
        if check.id in skip:
            findings.append(Finding(check.id, "", "ok", SKIPPED))
            if check.id == ssh.ID:
                findings += [finding for finding in ssh.judge(evidence) if finding.node not in evidence.facts]
            continue
        findings += judge_one(check, evidence)
    return findings


def judge_one(check: Check, evidence: Evidence) -> list[Finding]:
    """One check's findings; those it made before it broke are kept."""
    findings: list[Finding] = []
    try:
        for finding in check.judge(evidence):
            assert finding.check == check.id and (finding.level == "ok" or finding.hint), finding
            findings.append(finding)
    except Exception as error:  # a fault of ours must not hide what the other checks have found
        message = f"this check broke: {type(error).__name__}: {error}"
        hint = f"homelab preflight --skip {check.id}; please report it with: homelab preflight --json"
        findings.append(Finding(check.id, "", "fail", message, hint))
    return findings


def _refuse_unknown(names: Collection[str], option: str) -> None:
    for name in names:
        if name not in IDS:
            raise InputError(
                f'there is no check "{name}".{did_you_mean(name, IDS)}',
                where=f"{option} {name}",
                hint=f"use one of: {', '.join(IDS)}",
            )
