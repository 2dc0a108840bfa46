"""What a check is. Adding a check is one function and one file of recorded cases.

The function goes into any file of a sub-room of homelab/controller/checks (machine, gpu, network, ...), where `homelab.controller.checks.registry` finds it:

    @check("disk.room", "the disk has room for the checkpoints", worst="fail", sees="resources")
    def room(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
        if facts.resources.disk_free_bytes ...:
            yield Problem("fail", "what was seen", "the command that fixes it")

The cases are tests/controller/checks/recorded/disk.room.toml: answers of a node that the check finds fault with, and answers that it leaves alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from homelab.controller.base.hint import NO_COMMAND, Command, Hint
from homelab.controller.checks.evidence import Evidence, Finding, Level
from homelab.controller.config.cluster import Node
from homelab.controller.facts.node import Facts

# What a check looks at: a probe of the node by its name, or one of the other sources of `Evidence`.
SOURCES = frozenset(Facts.model_fields) - {"node", "broken"} | {"login", "dials", "collective", "sample", "build", "plan"}


class Problem(NamedTuple):
    """What a judge found. `hint` tells how to fix it; `fix`, where one command does that, is the command that `homelab preflight --fix`
    offers to run (every word of a node or a person is quoted). Without a hint the fix is the hint. `is_busy`: nothing is wrong with the node, which has
    other work: no training is started there meanwhile."""

    level: Level
    message: str
    hint: str = ""
    fix: Command = NO_COMMAND
    is_busy: bool = False


OfNode = Callable[[Evidence, Node, Facts], Iterable[Problem]]
OfCluster = Callable[[Evidence], Iterable[tuple[str, Problem]]]
Judge = TypeVar("Judge", bound=Callable[..., Any])
Summary = Callable[[Evidence, Node, Facts], str]
Needs = Callable[[Evidence], str | None]


@dataclass(frozen=True)
class Check:
    """One thing that can be wrong.

    `id` is "subject.thing". `worst` is the highest level that it finds. `sees` names what it looks at, one of SOURCES. Exactly one of
    the judges is there: `of_node` is called for every node that answered and whose probe did not break, `of_cluster` once; it yields
    node names with problems. The check is shown after the check `after`. `always`: it is judged even where a person skips it.
    `is_certain`: what it finds ends every launch, so to skip it helps nobody.
    """

    id: str
    title: str
    worst: Level
    sees: str
    of_node: OfNode | None = None
    of_cluster: OfCluster | None = None
    after: str = ""
    always: bool = False
    is_certain: bool = False

    @property
    def subject(self) -> str:
        """The part before the dot."""
        return self.id.partition(".")[0]

    def is_among(self, names: Collection[str]) -> bool:
        """Whether `names` has the check or its whole subject."""
        return self.id in names or self.subject in names

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
        return Finding(
            self.id, node, problem.level, problem.message, Hint.of_parts([problem.hint or problem.fix]), problem.fix, problem.is_busy
        )


def nothing_needed(evidence: Evidence) -> str | None:
    """The default of `Subject.needs`."""
    return None


@dataclass(frozen=True)
class Subject:
    """A group of checks that share a row of the table.

    `summary` is the row's text for a node without problems. `needs` names what is missing for a judgement ("needs
    a recipe"), None when nothing is missing. `cluster_first`: findings about no single node are shown before those of the nodes.
    """

    id: str
    title: str
    summary: Summary
    needs: Needs = nothing_needed
    after: str = ""
    cluster_first: bool = False
    checks: tuple[Check, ...] = ()


DECLARED_CHECKS: list[Check] = []
DECLARED_SUBJECTS: list[Subject] = []
_newest: dict[tuple[str, str], str] = {}  # (file, subject) -> the check that was declared there before


def check(
    id: str, title: str, *, worst: Level, sees: str, after: str = "", always: bool = False, is_certain: bool = False
) -> Callable[[Judge], Judge]:
    """Declare a judge as a check: (evidence, node, facts) is asked for every node, (evidence) once for the cluster.

    Without `after` it is shown after the check of the same subject that its file declares before it. Raises ValueError for a `sees`
    that is none of SOURCES.
    """
    if sees not in SOURCES:
        raise ValueError(f'the check {id} sees "{sees}", which is none of: {", ".join(sorted(SOURCES))}')

    def declare(judge: Judge) -> Judge:
        is_of_cluster = len(inspect.signature(judge).parameters) == 1
        place = (judge.__module__, id.partition(".")[0])
        DECLARED_CHECKS.append(
            Check(
                id, title, worst, sees, of_node=None if is_of_cluster else cast(OfNode, judge),
                of_cluster=cast(OfCluster, judge) if is_of_cluster else None, after=after or _newest.get(place, ""), always=always,
                is_certain=is_certain,
            )
        )  # fmt: skip
        _newest[place] = id
        return judge

    return declare


def subject(
    id: str, title: str, *, after: str = "", needs: Needs = nothing_needed, cluster_first: bool = False
) -> Callable[[Summary], Summary]:
    """Declare a subject on the function that makes its summary of a node. Its row is shown after that of the subject `after`."""

    def declare(summary: Summary) -> Summary:
        DECLARED_SUBJECTS.append(Subject(id, title, summary, needs, after, cluster_first))
        return summary

    return declare


class Placed(Protocol):
    """What has a place in an order."""

    @property
    def id(self) -> str: ...

    @property
    def after(self) -> str: ...


Item = TypeVar("Item", bound=Placed)


def in_order(items: Sequence[Item], after: str = "") -> list[Item]:
    """Each item behind the one that its `after` names, of several the last declared first. Raises ValueError where that one does not exist."""
    unknown = sorted({item.after for item in items} - {item.id for item in items} - {""})
    if unknown:
        raise ValueError(f"no check or subject is called {', '.join(unknown)}")
    ordered: list[Item] = []
    for item in items if not after else reversed(items):
        if item.after == after:
            ordered += [item, *in_order(items, item.id)]
    return ordered
