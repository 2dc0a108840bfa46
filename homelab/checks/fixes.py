"""What `homelab preflight --fix` offers to run: the fixes of the findings, each once, in the order in which it pays to run them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from homelab.checks.evidence import Finding


@dataclass(frozen=True)
class Fix:
    """A shell line for the controller's terminal, and what it mends. `needs_root`: it asks for sudo, or runs as root."""

    command: str
    mends: tuple[Finding, ...]

    @property
    def needs_root(self) -> bool:
        """Whether it changes the machine, and not only the person's own files."""
        return re.search(r"(^|[\s'\"&;])sudo ", self.command) is not None

    @property
    def title(self) -> str:
        """Who is mended of what: "laptop, python.packages"."""
        return "; ".join(f"{finding.node or 'this machine'}, {finding.check}: {finding.message}" for finding in self.mends)


def offered(findings: Iterable[Finding]) -> list[Fix]:
    """Failures first, then warnings; a command that mends several things comes once. Findings without a fix are left out."""
    by_command: dict[str, list[Finding]] = {}
    for finding in sorted((finding for finding in findings if finding.fix), key=lambda finding: finding.level != "fail"):
        by_command.setdefault(finding.fix, []).append(finding)
    return [Fix(command, tuple(mended)) for command, mended in by_command.items()]


def by_hand(findings: Iterable[Finding]) -> list[Finding]:
    """What no command can mend alone: a decision, an edit, a cable."""
    return [finding for finding in findings if finding.level != "ok" and not finding.fix]
