"""Which rank failed first, why, and what mends it. Pure: from the nodes' last answers to one Diagnosis.

One failure makes every rank fail: the others lose their connections within a second or time out. So each failed rank is
judged by its own last words first, and only a rank that names a reason of its own may be the culprit; among several the
first by time is, and of two at the same second the one whose words say more.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from types import MappingProxyType

from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from homelab.checks.commands import on_node, path_word
from homelab.config.cluster import Node
from homelab.diagnose import endings, topics
from homelab.diagnose.rules import RULES
from homelab.diagnose.shipped import Shipped
from homelab.diagnose.suspects import Suspect, absent, first_line, of_node, person, silent, unconnected
from homelab.planning.model import Shown
from homelab.runs.reply import Reply
from homelab.runs.state import newest_attempt

_MEMORY_FULL = 0.92
_OF_A_NODE = {rule.id for rule in endings.OF_A_NODE}
# Another value of what stands there is another training; a recovery goes on with the old one.
_OF_A_RECIPE = re.compile(r"(?:set|lower|raise) \[(?:model|data|method|train)\]")
_LAUNCH = re.compile(r"homelab launch(?: (?:'[^']*'|[^\s;('])+)+")
_REASONS = {rule.id for rule in (*RULES, *endings.ENDINGS) if rule.role == "cause" and rule.specificity >= 50}


class Victim(Shown):
    """A rank that failed because another one did; `saw` is its own last word."""

    node: str
    rank: int | None
    saw: str


class Diagnosis(Shown):
    """Why an attempt failed. `cause` is the rule's id; `hint` is the command or the edit that mends it; `topic`, where there is
    one, is what `homelab explain` has more about.

    `retryable` means that starting again from the newest checkpoint can help. It says nothing of how often: a cause
    that comes back at the same place is no accident.
    """

    cause: str
    title: str
    first_node: str
    first_rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    where: str = ""
    because: tuple[str, ...] = ()
    hint: str
    retryable: bool
    victims: tuple[Victim, ...] = ()
    topic: str = ""

    @property
    def names_a_reason(self) -> bool:
        """False where it is only known that something went wrong, or who waited in vain."""
        return self.cause in _REASONS

    @property
    def is_of_a_rank(self) -> bool:
        """A reason that a rank or its torchrun gave; not that a node is gone, or cannot be asked."""
        return self.names_a_reason and self.cause not in _OF_A_NODE

    @property
    def launch(self) -> str:
        """The command that starts a new training, where what mends it is one; empty where the run itself can go on."""
        found = _LAUNCH.search(self.hint)
        return found[0] if found and "homelab recover" not in self.hint else ""


def diagnose(
    run: str,
    replies: Mapping[str, Reply],
    unreachable: Mapping[str, str],
    *,
    nodes: Mapping[str, Node] | None = None,
    own_files: Collection[Shipped] = (),
    silent_ranks: Collection[int] = (),
    ways: Mapping[str, str] = MappingProxyType({}),
    options: str = "",
) -> Diagnosis | None:
    """The cause of the newest attempt's failure, or None when nothing has failed.

    `unreachable` maps a node to the reason it could not be asked. `nodes`, by name, say how a hint's command reaches them
    (default: as `ssh NAME`), `own_files` are the person's files that were shipped, and `options` is what a follow-up command
    of homelab needs behind the run's name.
    `silent_ranks` are those whose heartbeat was missed before the attempt was stopped. `ways`: what would make a node of `unreachable`
    answer, where its connection said so.
    """
    attempt = newest_attempt(replies)
    suspects = [
        suspect
        for node, reply in replies.items()
        if reply.run is not None and reply.run.attempt == attempt
        for suspect in of_node(node, reply, silent_ranks)
    ]
    suspects += absent(unreachable, ways, is_anybody_heard=bool(replies))
    suspects += unconnected(replies, attempt, nodes or {})
    if not suspects:
        return None
    if min(suspect.tier for suspect in suspects) >= 3:
        suspects += silent(replies, attempt, {suspect.rank for suspect in suspects if suspect.rank is not None})
    suspects.sort(key=lambda suspect: suspect.order)
    return _explain(run, suspects, replies, nodes or {}, own_files, options)


def _explain(
    run: str,
    suspects: list[Suspect],
    replies: Mapping[str, Reply],
    nodes: Mapping[str, Node],
    own_files: Collection[Shipped],
    options: str,
) -> Diagnosis:
    first, others = suspects[0], suspects[1:]
    file = next((file for file in own_files if file.place(first.where)), None)
    values = defaultdict(
        lambda: "?",
        {
            "path": first.where or "?",
            "where": (file and file.place(first.where)) or first.where or f"the log of {person(first.node, first.rank)}",
            "message": first_line(first.saw),
            "port": "of the rendezvous",
            **first.values,
            "node": first.node,
            "run": run,
            "options": options,
            "rank": str(first.rank),
            "code": str(first.exit_code),
            "signal": str(first.signal),
        },
    )
    title = re.sub(r"\brank None on ", "", first.rule.title.format_map(values))
    by = first.said_by or person(first.node, first.rank)
    because = [f"{by}: {first_line(first.saw)}" if by else first_line(first.saw)] if first.saw else []
    if first.rule is endings.UNREACHABLE and not replies and len(others) > 0:
        because.append("no node of the run answers: it may be this machine's own network")
    if first.where:
        because.append(f"at {first.where}")
    if first.exit_code or first.signal:
        ended = f"signal {first.signal}" if first.signal else f"exit code {first.exit_code}"
        if ended not in first.saw:
            because.append(f"it ended with {ended}")
    same = [other for other in others if other.rule is first.rule and other.tier <= 2]
    if same:
        because.append("the same on " + ", ".join(person(other.node, other.rank) for other in same))
    because += [
        f"{person(other.node, other.rank)}, too: {first_line(other.saw)}"
        for other in others
        if other.tier <= 1 and other not in same and (other.node, other.rank) != (first.node, first.rank)
    ]
    load = replies[first.node].load if first.node in replies else None
    if load and load.memory_used_bytes and load.memory_total_bytes:
        full = load.memory_used_bytes / load.memory_total_bytes
        if full >= _MEMORY_FULL:
            because.append(f"{full:.0%} of the memory of {first.node} is in use")
    victims = {(other.node, other.rank): other for other in others if other.tier > first.tier and other.tier >= 3}
    victims.pop((first.node, first.rank), None)
    if first.rule in endings.OF_THE_CONTROLLER:  # that it cannot be asked made nobody fail
        because += [f"{person(*place)}: {first_line(other.saw)}" for place, other in victims.items()]
        victims = {}
    topic = topics.of_rule(first.rule.id, first.saw)
    return Diagnosis(
        cause=first.rule.id,
        title=title,
        first_node=first.node,
        first_rank=first.rank,
        exit_code=first.exit_code,
        signal=first.signal,
        where=first.where,
        because=tuple(because),
        hint=_hint(first, run, options, (file, own_files), values, nodes),
        retryable=first.rule.retryable,
        victims=tuple(Victim(node=v.node, rank=v.rank, saw=first_line(v.saw)) for v in victims.values()),
        topic=topic.id if topic else "",
    )


class _OnNode:
    """What {on_node:COMMAND} of a rule's hint becomes."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __format__(self, command: str) -> str:
        return on_node(self._node, command)


def _hint(
    first: Suspect, run: str, options: str, files: tuple[Shipped | None, Collection[Shipped]], values: Mapping[str, object], nodes: Mapping[str, Node]
) -> str:
    """What mends it. `files`: the person's own where the error is in that (with another content it is another training), and all of the run."""
    recover = f"homelab recover {run}"
    file, own_files = files
    recipe = next((known.recipe_file for known in own_files), "RECIPE")
    launch = f"homelab launch {recipe}{options}"
    if first.own_hint:  # a worker does not know the controller's options and files
        hint = re.sub(rf"{re.escape(recover)}(?![\w.-])", lambda _: recover + options, first.own_hint)
        if "homelab " in hint:
            return hint
        if file is not None:
            return f"{hint}; in {values['where']}, then: {launch}"
        return f"{hint}; then, as a new training: {launch}" if _OF_A_RECIPE.match(hint) else hint
    template = endings.SCRIPT_ERROR_HINT if file and first.rule is endings.PYTHON_ERROR else first.rule.hint
    node = nodes.get(first.node) or Node.model_construct(name=first.node, host=first.node)
    more = {"on_node": _OnNode(node), "python": path_word(node.python), "recipe": recipe}
    return template.format_map(defaultdict(lambda: "?", {**values, **more}))


def render(diagnosis: Diagnosis) -> RenderableType:
    """One box: what happened, why that is believed, what mends it, who only suffered from it, and where more is said."""
    parts: list[RenderableType] = [Text(diagnosis.title, style="bold")]
    parts += [_labelled("because" if number == 0 else "", line, "") for number, line in enumerate(diagnosis.because)]
    parts.append(_labelled("fix", diagnosis.hint, "bold"))
    if diagnosis.victims:
        ranks = ", ".join(person(victim.node, victim.rank) for victim in diagnosis.victims)
        parts.append(_labelled("victims", f"{ranks}: failed only because of it", "dim"))
    if diagnosis.topic:
        parts.append(_labelled("more", f"homelab explain {diagnosis.topic}", ""))
    return Panel(
        Group(*parts), title="why it failed", title_align="left", border_style="red", box=ROUNDED, padding=(0, 1)
    )


def _labelled(label: str, text: str, style: str) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=7, style="dim")
    table.add_column(ratio=1, overflow="fold")
    table.add_row(label, Text(text, style=style))
    return table
