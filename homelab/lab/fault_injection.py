"""Every fault of `homelab lab fault`: what happens to a node during a run, and what is misconfigured before one."""

from __future__ import annotations

from typing import TypedDict

from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import homelab
from homelab.lab import faults, held_fault
from homelab.lab.lab import Lab
from homelab.lab.misconfigurations import catalogue

_NEEDS = {"recipe": "the small model", "deep": "preflight --deep"}


class FaultEntry(TypedDict):
    """One line of `homelab lab faults --json`. `found_by`: checks of preflight; `undo`: whether `--undo` takes it back."""

    name: str
    title: str
    when: str
    found_by: list[str]
    needs: list[str]
    undo: bool


def entries() -> list[FaultEntry]:
    """All of them: first those of a running node, then the misconfigurations, sorted by the check that finds them."""
    listed = [
        FaultEntry(
            name=name, title=title, when="during a run", found_by=[], undo=name in faults.UNDONE_BY,
            needs=["namespaces"] if name in faults.NEED_NAMESPACES else [],
        )
        for name, title in faults.FAULTS.items()
    ]  # fmt: skip
    for one in catalogue.all_misconfigurations():
        needs = [*(["namespaces"] if one.namespaces else []), *(_NEEDS[need] for need in one.needs if need in _NEEDS)]
        needs += ["the head"] if one.where == "head" else ["two nodes"] if one.where == "pair" else []
        listed.append(FaultEntry(name=one.name, title=one.title, when="before a run", found_by=list(one.checks), needs=needs, undo=True))
    return listed


def inject(lab: Lab, node: str, text: str) -> list[str]:
    """Let `node` have the fault; what to type next. Raises InputError for an unknown one, HomelabError where it is impossible."""
    kind = text.partition("=")[0]
    undo_command = homelab("lab fault", str(lab.folder), node, kind, "--undo")
    if kind in faults.FAULTS:
        lab.fault(node, text)
        return [f"Undo: {undo_command}"] if kind in faults.UNDONE_BY and text != faults.UNDONE_BY[kind] else []
    checks = ", ".join(catalogue.find(text).checks)
    lab.state.node(node)
    options = held_fault.start(lab.folder, node, text)
    return [f"Next: homelab preflight {options}  (found by {checks})", f"Undo: {undo_command}"]


def undo(lab: Lab, node: str, text: str) -> None:
    """Take the fault back. Raises InputError where it is not there or cannot be undone, HomelabError when that fails."""
    kind = text.partition("=")[0]
    if kind in faults.UNDONE_BY:
        lab.fault(node, faults.UNDONE_BY[kind])
    elif kind in faults.FAULTS:
        hint = homelab("recover") if kind == "kill-worker" else homelab("lab status", str(lab.folder))
        raise InputError(f"{kind} cannot be undone", where="--undo", hint=hint)
    else:
        lab.state.node(node)
        held_fault.undo(lab.folder, node, catalogue.find(text).name)
