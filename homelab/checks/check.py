"""What a check is: an id, a title, what it looks at, and a pure judge. Adding one is one function and one file of recorded cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from homelab.checks.evidence import Evidence, Finding, Level
from homelab.config.cluster import Node
from homelab.facts import Facts


class Problem(NamedTuple):
    """What a judge found. `hint` says how to mend it; `fix`, where there is one, is a shell line for the controller's terminal
    that does it (every word of a node or a person quoted), which `homelab preflight --fix` offers to run."""

    level: Level
    message: str
    hint: str = ""
    fix: str = ""


OfNode = Callable[[Evidence, Node, Facts], Iterable[Problem]]
OfCluster = Callable[[Evidence], Iterable[tuple[str, Problem]]]


@dataclass(frozen=True)
class Check:
    """One thing that can be wrong.

    `id` is "subject.thing". `worst` is the highest level it finds. `sees` names what it looks at: a probe of the agent
    (`homelab.node.probes`), or "login", "dials", "collective", "sample", "plan". Exactly one of the judges is there: `of_node` is
    called for every node that answered and whose probe did not break, `of_cluster` once, and yields node names with problems.
    """

    id: str
    title: str
    worst: Level
    sees: str
    of_node: OfNode | None = None
    of_cluster: OfCluster | None = None

    @property
    def subject(self) -> str:
        """The part before the dot."""
        return self.id.partition(".")[0]

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        """All findings of this check; none where nothing is wrong."""
        if self.of_cluster is not None:
            for name, problem in self.of_cluster(evidence):
                yield self._finding(name, problem)
        if self.of_node is not None:
            for node in evidence.cluster.nodes:
                facts = evidence.facts.get(node.name)
                if facts is not None and self.sees not in facts.broken:
                    for problem in self.of_node(evidence, node, facts):
                        yield self._finding(node.name, problem)

    def _finding(self, node: str, problem: Problem) -> Finding:
        return Finding(self.id, node, problem.level, problem.message, problem.hint or problem.fix, problem.fix)


def nothing_needed(evidence: Evidence) -> str | None:
    """The default of `Subject.needs`."""
    return None


@dataclass(frozen=True)
class Subject:
    """A group of checks that share a row of the table.

    `summary` is what the row says of a node on which nothing of it is wrong. `needs` says what is missing for judging it at
    all ("needs a recipe"), None when nothing is.
    """

    id: str
    title: str
    checks: tuple[Check, ...]
    summary: Callable[[Evidence, Node, Facts], str]
    needs: Callable[[Evidence], str | None] = nothing_needed
