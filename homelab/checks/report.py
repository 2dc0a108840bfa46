"""Findings for people and for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from homelab.checks.evidence import Finding, Level

_ORDER: dict[Level, int] = {"ok": 0, "warn": 1, "fail": 2}
_STYLES: dict[Level, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_MARKS: dict[Level, str] = {"ok": "ok", "warn": "warn", "fail": "FAIL"}
_MOST_NODES_WITH_TEXT = 4  # with more, the columns only have room for the marks


def worst(findings: Iterable[Finding]) -> Level:
    """The highest level of all; ok when there are none."""
    return max((finding.level for finding in findings), key=_ORDER.__getitem__, default="ok")


def as_json(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """[{"check", "node", "level", "message", "hint"}], in the order of the checks; node "" is the cluster or this machine."""
    return [finding.as_dict() for finding in findings]


def table(findings: Sequence[Finding], nodes: Sequence[str]) -> RenderableType:
    """Checks x nodes, then what is not about one node, then what to mend: node, what, fix (failures first).

    Fits 80 columns. Printed with `soft_wrap=True`, the commands of the fixes stay in one line and can be pasted.
    """
    parts: list[RenderableType] = [_grid(findings, nodes)]
    notes = _notes(findings)
    if notes:
        parts += [Text(), *notes]
    for level, title in (("fail", "To mend"), ("warn", "Worth mending")):
        chosen = [finding for finding in findings if finding.level == level]
        if chosen:
            parts += [Text(), Text(title, style="bold")]
            for finding in chosen:
                parts += _action(finding)
    return Group(*parts)


def _grid(findings: Sequence[Finding], nodes: Sequence[str]) -> Table:
    with_text = len(nodes) <= _MOST_NODES_WITH_TEXT
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=with_text)
    found.add_column("check", no_wrap=True, width=max([len("check"), *(len(finding.check) for finding in findings)]))
    for node in nodes:
        found.add_column(Text(node), no_wrap=True, overflow="ellipsis", ratio=1 if with_text else None)
    for check in dict.fromkeys(finding.check for finding in findings):
        mine = [finding for finding in findings if finding.check == check]
        if any(finding.node in nodes for finding in mine):
            found.add_row(
                check, *(_cell([finding for finding in mine if finding.node == node], len(nodes)) for node in nodes)
            )
    return found


def _cell(findings: Sequence[Finding], node_count: int) -> Text:
    if not findings:
        return Text("-", style="dim")
    first = max(findings, key=lambda finding: _ORDER[finding.level])
    cell = Text(_MARKS[first.level], style=_STYLES[first.level])
    if node_count <= _MOST_NODES_WITH_TEXT:
        cell.append(f" {first.message}", style="dim" if first.level == "ok" else "default")
    return cell


def _notes(findings: Sequence[Finding]) -> list[Text]:
    """One line for each thing that is ok and about no single node, naming its checks."""
    checks: dict[str, list[str]] = {}
    for finding in findings:
        if not finding.node and finding.level == "ok":
            checks.setdefault(finding.message, []).append(finding.check)
    return [Text(f"{', '.join(names)}: {message}", style="dim", no_wrap=False) for message, names in checks.items()]


def _action(finding: Finding) -> list[RenderableType]:
    head = Text(no_wrap=False)
    head.append(_MARKS[finding.level], style=_STYLES[finding.level])
    head.append(f" {finding.node or 'this machine'}, {finding.check}: ", style="bold")
    head.append(finding.message)
    # Without a width of its own: it is wrapped where the caller wraps, and left whole where the caller does not.
    return [head, Text(f"  fix: {finding.hint}", style="cyan")]
