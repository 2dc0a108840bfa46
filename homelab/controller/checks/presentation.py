"""Findings for people and for programs, and the commands that fix them, in the order in which it pays to run them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from homelab.controller.base.hint import Command, Hint
from homelab.controller.checks.check import Subject
from homelab.controller.checks.evidence import Finding, Level
from homelab.controller.checks.machine.version_drift import NOT_THERE

_ORDER: dict[Level, int] = {"ok": 0, "warn": 1, "fail": 2}
_STYLES: dict[Level, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_MARKS: dict[Level, str] = {"ok": "ok", "warn": "warn", "fail": "FAIL"}
_MOST_NODES_WITH_TEXT = 4  # with more, the columns only have room for the marks
_MOST_COLUMNS = 10  # with more, a row counts its nodes instead
Differences = Sequence[tuple[str, Mapping[str, str]]]  # what differs -> node -> its value


def worst(findings: Iterable[Finding]) -> Level:
    """The highest level of all; ok when there are none."""
    return max((finding.level for finding in findings), key=_ORDER.__getitem__, default="ok")


def answer(findings: Sequence[Finding], nodes: Sequence[str], *, refused: str = "", is_all: bool = True) -> Text:
    """The first line: whether these nodes can train, or how much is wrong and where. `refused`: why a launch would not start; `is_all`: no check was left out."""
    level = worst(findings)
    found = [finding for finding in findings if finding.level == level != "ok"]
    count = len({(finding.check, finding.message) for finding in found})
    places = list(dict.fromkeys(finding.node or "this machine" for finding in found))
    on = f"on {', '.join(places)}" if len(places) <= _MOST_NODES_WITH_TEXT else f"on {len(places)} nodes"
    if level == "fail":
        return Text(f"Not ready to train: {count} fault{'s' * (count != 1)} {on}.", style=_STYLES["fail"])
    if refused:
        return Text(f"Not ready to train: {refused}", style=_STYLES["fail"])
    busy = next((finding.node for finding in findings if finding.is_busy), None)
    if busy is not None:
        return Text(f"Nothing fails, and {busy} has other work.", style=_STYLES["warn"])
    ready = "Ready to train" if is_all else "Ready to train, as far as it was checked"
    warned = f" ({count} warning{'s' * (count != 1)} {on})" if count else ""
    return Text(f"{ready}: nothing fails on {len(nodes)} node{'s' * (len(nodes) != 1)}{warned}.", style=_STYLES["ok"])


def as_json(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """[{"check", "node", "level", "message", "hint", "fix"}], in the order of the checks; node "" is the cluster or this machine."""
    return [finding.as_dict() for finding in findings]


def table(findings: Sequence[Finding], nodes: Sequence[str], differences: Differences = ()) -> RenderableType:
    """Subjects x nodes, what is not about one node, what differs between nodes, then what to fix: failures first, with their fix.

    Fits 80 columns. Printed with `soft_wrap=True`, the commands of the fixes stay in one line and can be pasted.
    """
    parts: list[RenderableType] = [_counts(findings, nodes) if len(nodes) > _MOST_COLUMNS else _grid(findings, nodes)]
    notes = _notes(findings)
    if notes:
        parts += [Text(), *notes]
    if differences:
        parts += [Text(), Text("What differs", style="bold"), _differences(differences, nodes)]
    for level, title in (("fail", "To fix"), ("warn", "Worth fixing")):
        chosen = [finding for finding in findings if finding.level == level]
        if chosen:
            parts += [Text(), Text(title, style="bold")]
            alike: dict[tuple[str, str], list[Finding]] = {}
            for finding in chosen:
                alike.setdefault((finding.check, finding.message), []).append(finding)
            for group in alike.values():
                parts += _action(group)
    return Group(*parts)


def listing(subjects: Sequence[Subject]) -> str:
    """All checks as a Markdown table: the page of preflight shows it, and `homelab preflight --list` prints it."""
    lines = ["| check | true if all is right | otherwise |", "|---|---|---|"]
    lines += [f"| `{check.id}` | {check.title} | {check.worst} |" for subject in subjects for check in subject.checks]
    return "\n".join(lines) + "\n"


def _differences(differences: Differences, nodes: Sequence[str]) -> Table:
    """Only what differs; nodes that agree with each other share one cell's text, so nothing has to be compared by eye."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column("")
    holders = [node for node in nodes if any(node in values for _, values in differences)]
    for node in holders:
        grid.add_column(Text(node), overflow="fold")
    for subject, values in differences:
        # What is missing is odd, however many lack it.
        present = [value for value in values.values() if value != NOT_THERE]
        common = max(present, key=present.count, default="")
        cells = [Text(values.get(node, "-"), style="dim" if values.get(node) == common else "yellow") for node in holders]
        grid.add_row(Text(subject), *cells)
    return grid


def _counts(findings: Sequence[Finding], nodes: Sequence[str]) -> Table:
    """One row per subject: how many nodes are well, and the names of the others."""
    counted = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("check", "ok", "warn", "FAIL"):
        counted.add_column(name, no_wrap=name == "check", overflow="fold")
    for subject in dict.fromkeys(finding.subject for finding in findings if finding.node in nodes):
        levels: dict[str, Level] = {}
        for finding in findings:
            if finding.subject == subject and finding.node in nodes:
                levels[finding.node] = max(levels.get(finding.node, "ok"), finding.level, key=_ORDER.__getitem__)
        named = {level: [node for node in nodes if levels.get(node) == level] for level in _ORDER}
        counted.add_row(
            subject, Text(f"{len(named['ok'])} of {len(nodes)}", style=_STYLES["ok"]),
            *(Text("all" if len(named[level]) == len(nodes) else ", ".join(named[level]), style=_STYLES[level]) for level in ("warn", "fail")),
        )  # fmt: skip
    return counted


def _grid(findings: Sequence[Finding], nodes: Sequence[str]) -> Table:
    with_text = len(nodes) <= _MOST_NODES_WITH_TEXT
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=with_text)
    table.add_column("check", no_wrap=True, width=max([len("check"), *(len(finding.subject) for finding in findings)]))
    for node in nodes:
        table.add_column(Text(node), no_wrap=not with_text, ratio=1 if with_text else None)
    for subject in dict.fromkeys(finding.subject for finding in findings):
        of_subject = [finding for finding in findings if finding.subject == subject]
        if any(finding.node in nodes for finding in of_subject):
            table.add_row(subject, *(_cell([finding for finding in of_subject if finding.node == node], len(nodes)) for node in nodes))
    return table


def _cell(findings: Sequence[Finding], node_count: int) -> Text:
    if not findings:
        return Text("-", style="dim")
    first = max(findings, key=lambda finding: _ORDER[finding.level])
    cell = Text(_MARKS[first.level], style=_STYLES[first.level])
    if node_count <= _MOST_NODES_WITH_TEXT:  # what is wrong stands whole below the table, with its fix
        cell.append(f" {first.message}" if first.level == "ok" else f" {first.check.partition('.')[2]}", style="dim")
    return cell


def _notes(findings: Sequence[Finding]) -> list[Text]:
    """One line for each thing that is ok and about no single node, naming its checks."""
    checks: dict[str, list[str]] = {}
    for finding in findings:
        if not finding.node and finding.level == "ok":
            checks.setdefault(finding.message, []).append(finding.check)
    return [Text(f"{', '.join(names)}: {message}", style="dim", no_wrap=False) for message, names in checks.items()]


def _action(findings: Sequence[Finding]) -> list[RenderableType]:
    """One thing that is wrong, on one node or on several: named once, then the fix on each.

    A line with a command ends with it, so that it can be pasted; what else is to be known of it stands in a line of its own.
    """
    first = findings[0]
    head = Text(no_wrap=False)
    head.append(_MARKS[first.level], style=_STYLES[first.level])
    head.append(f" {_places(findings)}, {first.check}: ", style="bold")
    head.append(first.message)
    by_command: dict[str, list[Finding]] = {}
    notes: list[str] = []
    for finding in findings:
        command, note = _command_and_note(finding)
        by_command.setdefault(command, []).append(finding)
        notes += [note] if note and note not in notes else []
    # Without a width of their own: they are wrapped where the caller wraps, and left whole where the caller does not.
    lines = [f"fix: {text}" if len(by_command) == 1 else f"fix {_places(of)}: {text}" for text, of in by_command.items()]
    body = [*(Text(f"  {line}", style="cyan") for line in lines), *(Text(f"  note: {note}", style="dim") for note in notes)]
    return [head, *body]


def _places(findings: Sequence[Finding]) -> str:
    return ", ".join(dict.fromkeys(finding.node or "this machine" for finding in findings))


def _command_and_note(finding: Finding) -> tuple[str, str]:
    """The fix and what the hint says of it, where the hint begins with the fix; else the hint."""
    note = finding.hint.after(finding.fix) if finding.fix and isinstance(finding.hint, Hint) else None
    if note is None:
        return finding.hint, ""
    note = note.strip(" ;")
    return finding.fix, note[1:-1] if note.startswith("(") and note.endswith(")") else note


@dataclass(frozen=True)
class Fix:
    """A command for the controller's terminal, and the findings that it fixes."""

    command: Command
    fixes: tuple[Finding, ...]

    @property
    def title(self) -> str:
        """What it fixes where: "laptop, python.packages: torch is not installed"."""
        return "; ".join(f"{finding.node or 'this machine'}, {finding.check}: {finding.message}" for finding in self.fixes)


def offered_fixes(findings: Iterable[Finding]) -> list[Fix]:
    """Failures first, then warnings; a command that fixes several things comes once. Findings without a fix are left out."""
    by_command: dict[Command, list[Finding]] = {}
    for finding in sorted((finding for finding in findings if finding.fix), key=lambda finding: finding.level != "fail"):
        by_command.setdefault(finding.fix, []).append(finding)
    return [Fix(command, tuple(fixed)) for command, fixed in by_command.items()]


def fixed_by_hand(findings: Iterable[Finding]) -> list[Finding]:
    """What no command can fix alone: a decision, an edit, a cable."""
    return [finding for finding in findings if finding.level != "ok" and not finding.fix]
