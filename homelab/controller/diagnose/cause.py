"""Which rank failed first, why, and what fixes it. Pure: from the nodes' last answers to one Diagnosis.

One failure makes every rank fail: the others lose their connections within a second or time out. So each failed rank is
judged by its own last words first, and only a rank that names a reason of its own may be the culprit; among several the
first by time is, and of two at the same second the one whose words say more.
"""

from __future__ import annotations

import re
import string
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from homelab.controller.base.hint import NO_COMMAND, Command, Hint, Options, homelab
from homelab.controller.base.models import CommandField, DisplayValue, HintField
from homelab.controller.config.cluster import Node
from homelab.controller.diagnose import endings, traces
from homelab.controller.diagnose.matching import first_line
from homelab.controller.diagnose.rules import RULES
from homelab.controller.diagnose.suspects import Suspect, absent, of_node, person, silent, unconnected
from homelab.controller.facts.node_commands import on_node, path_word
from homelab.controller.run.shipped_files import Shipped
from homelab.controller.run.state import newest_attempt
from homelab.shared.protocol.run_messages import Reply

_MEMORY_FULL = 0.92
_LOG_LINES = 400
_OF_A_NODE = {rule.id for rule in endings.OF_A_NODE}
_REASONS = {rule.id for rule in (*RULES, *endings.ENDINGS) if rule.role == "cause" and rule.specificity >= 50}


class Victim(DisplayValue):
    """A rank that failed because another one did; `saw` is its own last word."""

    node: str
    rank: int | None
    saw: str


class Diagnosis(DisplayValue):
    """Why an attempt failed. `cause` is the rule's id; `hint` is the command or the edit that fixes it; `topic`, where there is
    one, is what `homelab explain` has more about.

    `launch` is the command that starts a new training, where that is the fix; empty where the run itself can go on, which the hint says first. The commands have no
    options: who shows them adds those of its reader (`with_options`).

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
    hint: HintField
    launch: CommandField = NO_COMMAND
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

    def with_options(self, options: Options) -> Diagnosis:
        """The same, in which the commands of ours have their options."""
        return self.model_copy(update={"hint": self.hint.with_options(options), "launch": self.launch.with_options(options)})


@dataclass(frozen=True)
class Context:
    """What the controller knows beside the answers of the nodes.

    `nodes`, by name, say how a hint's command reaches them (default: as `ssh NAME`). `own_files` are the person's files that
    were shipped, `near` the modules that lie near the run's own program on this machine, by name. `silent_ranks` are those whose
    heartbeat was missed before the attempt was stopped. `ways`: what makes a node that cannot be reached answer, where its
    connection said so.
    """

    nodes: Mapping[str, Node] = field(default_factory=dict)
    own_files: Collection[Shipped] = ()
    near: Mapping[str, str] = field(default_factory=dict)
    silent_ranks: Collection[int] = ()
    ways: Mapping[str, str] = field(default_factory=dict)


def diagnose(run: str, replies: Mapping[str, Reply], unreachable: Mapping[str, str], context: Context | None = None) -> Diagnosis | None:
    """The cause of the newest attempt's failure, or None when nothing has failed.

    `unreachable` maps a node to the reason why it could not be asked.
    """
    context = context or Context()
    attempt = newest_attempt(replies)
    suspects = [
        suspect
        for node, reply in replies.items()
        if reply.run is not None and reply.run.attempt == attempt
        for suspect in of_node(node, reply, context.silent_ranks)
    ]
    suspects += absent(unreachable, context.ways, is_anybody_heard=bool(replies))
    suspects += unconnected(replies, attempt, context.nodes)
    if not suspects:
        return None
    if min(suspect.tier for suspect in suspects) >= 3:
        suspects += silent(replies, attempt, tuple(suspects))
    suspects.sort(key=lambda suspect: suspect.order)
    first, *others = (_not_shipped(suspect, context.near) for suspect in suspects)
    return _explain(run, first, others, replies, context)


def _not_shipped(suspect: Suspect, near: Mapping[str, str]) -> Suspect:
    """Another rule for a module that the node lacks and that lies near the person's own program: it was not shipped."""
    module = suspect.values.get("module", "").partition(".")[0]
    if suspect.rule.id != "missing-package" or module not in near:
        return suspect
    return replace(suspect, rule=endings.NOT_SHIPPED, values={**suspect.values, "local": near[module]})


def _explain(run: str, first: Suspect, others: list[Suspect], replies: Mapping[str, Reply], context: Context) -> Diagnosis:
    from homelab.controller.diagnose import topic_index

    file = next((file for file in context.own_files if file.place(first.where)), None)
    values = _values(run, first, file)
    values["attempt"] = str(newest_attempt(replies))
    hint, launch = _fix(first, file, values, context)
    because = _because(first, others, replies)
    victims = {(other.node, other.rank): other for other in others if other.tier > first.tier and other.tier >= 3}
    victims.pop((first.node, first.rank), None)
    if first.rule in endings.OF_THE_CONTROLLER:  # no rank failed because the controller cannot ask a node
        because += [f"{person(*place)}: {first_line(other.saw)}" for place, other in victims.items()]
        victims = {}
    topic = topic_index.of_rule(first.rule.id, first.saw)
    return Diagnosis(
        cause=first.rule.id,
        title=re.sub(r"\brank None on ", "", first.rule.title.format_map(values)),
        first_node=first.node,
        first_rank=first.rank,
        exit_code=first.exit_code,
        signal=first.signal,
        where=first.where,
        because=tuple(because),
        hint=hint,
        launch=launch,
        retryable=first.rule.retryable,
        victims=tuple(Victim(node=v.node, rank=v.rank, saw=first_line(v.saw)) for v in victims.values()),
        topic=topic.id if topic else "",
    )


def _values(run: str, first: Suspect, file: Shipped | None) -> defaultdict[str, str]:
    """What the names in a rule's title and hint stand for. `file`: the person's own, where the error is in it."""
    own = {
        "path": first.where or "?",
        "raised_at": first.raised_at,
        "where": (file and file.place(first.where)) or first.where or f"the log of {person(first.node, first.rank)}",
        "message": first_line(first.saw),
        "port": "of the rendezvous",
        **first.values,
        "node": first.node,
        "run": run,
        "rank": str(first.rank),
        "code": str(first.exit_code),
        "signal": str(first.signal),
    }
    return defaultdict(lambda: "?", own)


def _because(first: Suspect, others: list[Suspect], replies: Mapping[str, Reply]) -> list[str]:
    """The reasons to believe it, one line each: its own words, its exit, and what other ranks and the node say."""
    because = []
    if first.saw:
        by = first.said_by or person(first.node, first.rank)
        because.append(f"{by}: {first_line(first.saw)}" if by else first_line(first.saw))
    if first.rule is endings.UNREACHABLE and not replies and others:
        because.append("no node of the run answers: it may be this machine's own network")
    if first.where:
        is_called = first.raised_at != first.where and traces.is_of_a_library(first.raised_at)
        because.append(f"at {first.raised_at}, called from {first.where}" if is_called else f"at {first.where}")
    ended = f"signal {first.signal}" if first.signal else f"exit code {first.exit_code}" if first.exit_code else ""
    if ended and ended not in first.saw:
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
    return because


def _fix(first: Suspect, file: Shipped | None, values: Mapping[str, str], context: Context) -> tuple[Hint, Command]:
    """What fixes it, and the command of the new training where it takes one. `file`: the person's own, where the error is in it; with
    another content it is another training.
    """
    launch = homelab(next((own_file.launch for own_file in context.own_files), "launch RECIPE"))
    own = Hint.said(first.own_hint)
    if own and (own.commands or not first.rule.environment):
        if own.commands:
            return own, NO_COMMAND
        if file is not None:  # a worker does not know the controller's files
            return Hint("{}; in {}, then: {}", own, values["where"], launch), launch
        return (Hint("{}; then, as a new training: {}", own, launch), launch) if first.needs_launch else (own, NO_COMMAND)
    run, node = values["run"], context.nodes.get(first.node) or Node.model_construct(name=first.node, host=first.node)
    # A traceback is longer than what is shown by default, and after a restart the newest attempt is another one.
    which = [
        *(["--attempt", values["attempt"]] if "attempt" in values else []),
        *([] if first.rank is None else ["--rank", str(first.rank)]),
    ]
    logs = homelab("logs", run, *which, "-n", str(_LOG_LINES))
    commands = {"recover": homelab("recover", run), "logs": logs, "status": homelab("status", run), "launch": launch}
    template = _template(first, file)
    hint = _filled(template, defaultdict(lambda: "?", {**values, **commands, "python": path_word(node.python)}), node)
    again = next((command for command in hint.commands if command in (launch, commands["recover"])), NO_COMMAND)
    return hint, launch if again == launch else NO_COMMAND


def _template(first: Suspect, file: Shipped | None) -> str:
    """The rule's own hint; for an exception that no rule knows by where it was raised, and by what had called that."""
    if first.rule is not endings.PYTHON_ERROR:
        return first.rule.hint
    if traces.is_of_a_library(first.where):
        return endings.LIBRARY_ERROR_HINT
    if traces.is_of_a_library(first.raised_at):
        return endings.CALLED_SCRIPT_HINT if file else endings.CALLED_ERROR_HINT
    return endings.SCRIPT_ERROR_HINT if file else first.rule.hint


def _filled(template: str, values: Mapping[str, str], node: Node) -> Hint:
    """A rule's hint with its values; {on_node:COMMAND} is the command as the controller runs it on this node."""
    parts: list[str] = []
    for text, name, form, _ in string.Formatter().parse(template):
        parts.append(Hint.said(text))
        if name == "on_node":
            parts.append(on_node(node, (form or "").format_map(values)))
        elif name:
            parts.append(values[name])
    return Hint.of_parts(parts)


def render(diagnosis: Diagnosis) -> RenderableType:
    """One box: what happened, why that is believed, what fixes it, who only suffered from it, and where more is said."""
    parts: list[RenderableType] = [Text(diagnosis.title, style="bold")]
    parts += [_labelled("because" if number == 0 else "", line, "") for number, line in enumerate(diagnosis.because)]
    parts.append(_labelled("fix", diagnosis.hint, "bold"))
    if diagnosis.victims:
        ranks = ", ".join(person(victim.node, victim.rank) for victim in diagnosis.victims)
        parts.append(_labelled("victims", f"{ranks}: failed only because of that", "dim"))
    if diagnosis.topic:
        parts.append(_labelled("more", f"homelab explain {diagnosis.topic}", ""))
    return Panel(Group(*parts), title="why it failed", title_align="left", border_style="red", box=ROUNDED, padding=(0, 1))


def _labelled(label: str, text: str, style: str) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=7, style="dim")
    table.add_column(ratio=1, overflow="fold")
    table.add_row(label, Text(text, style=style))
    return table
