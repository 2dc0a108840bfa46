"""What `homelab preflight --fix` offers to run: the fixes of the findings, each once, in the order in which it pays to run them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from homelab.controller.base.hint import Command
from homelab.controller.checks.evidence import Finding


@dataclass(frozen=True)
class Fix:
    """A command for the controller's terminal, and the findings that it fixes."""

    command: Command
    fixes: tuple[Finding, ...]

    @property
    def title(self) -> str:
        """What it fixes where: "laptop, python.packages: torch is not installed"."""
        return "; ".join(f"{finding.node or 'this machine'}, {finding.check}: {finding.message}" for finding in self.fixes)


def offered(findings: Iterable[Finding]) -> list[Fix]:
    """Failures first, then warnings; a command that fixes several things comes once. Findings without a fix are left out."""
    by_command: dict[Command, list[Finding]] = {}
    for finding in sorted((finding for finding in findings if finding.fix), key=lambda finding: finding.level != "fail"):
        by_command.setdefault(finding.fix, []).append(finding)
    return [Fix(command, tuple(fixed)) for command, fixed in by_command.items()]


def by_hand(findings: Iterable[Finding]) -> list[Finding]:
    """What no command can fix alone: a decision, an edit, a cable."""
    return [finding for finding in findings if finding.level != "ok" and not finding.fix]
