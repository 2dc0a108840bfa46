"""The rules: which words in a log mean what, and which command fixes it. The rules themselves are in the folder rules/."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from homelab.controller.diagnose import data_file

# cause: a reason by itself. symptom: what a rank sees when another one is silent; named only when nothing better is
# known. victim: what a rank sees when another one is gone; never named as the culprit.
Role = Literal["cause", "symptom", "victim"]


@dataclass(frozen=True)
class Rule:
    """One cause.

    `title` and `hint` may use {node}, {rank}, {run}, {where}, {message} and `pattern`'s named groups; `hint` also {recover}, {logs},
    {status} and {launch}, our commands for this run, {on_node:COMMAND}, which is COMMAND as the controller runs it there, and {python},
    the node's own. A hint with {launch} is fixed by a new training.
    `retryable`: a start from the newest checkpoint can help (a supervisor still gives up when the same cause comes back).
    `specificity`: of several rules that match, the highest wins; below 50 the rule only says that something is wrong,
    not what. No two rules that match the same words have the same one (tests/controller/diagnose/test_rules.py tries all samples against all rules).
    `environment`: the machine, an installed package, the network or the hub is at fault. Such a rule names no line of the person's own, and
    its hint goes before a general one of the worker. `explains`: words that count although they are only printed beside an exception that
    says less (a warning of CUDA, a line of NCCL).
    A pattern may also look at the place where an exception was raised: it stands on a line of its own behind the words, as "@ FILE:LINE in FUNCTION > ... > FUNCTION".
    In TOML, `patterns` are regular expressions of which one must match; upper and lower case are equal unless
    `case_sensitive = true`. Without patterns the rule matches no words.
    """

    id: str
    title: str
    hint: str
    retryable: bool
    specificity: int
    pattern: re.Pattern[str] = re.compile(r"(?!)")  # matches nothing
    role: Role = "cause"
    environment: bool = False
    explains: bool = False


def load(name: str) -> tuple[Rule, ...]:
    """The rules of the file homelab/controller/diagnose/NAME, in its order. Raises InputError with the file and the line of a rule that is none."""
    own = [field.name for field in fields(Rule) if field.name != "pattern"]
    needed = [field.name for field in fields(Rule) if field.default is MISSING]
    return data_file.each(name, "rules", _rule, (*own, "patterns", "case_sensitive"), needed)


def _rule(entry: dict[str, Any]) -> Rule:
    values = dict(entry)
    flags = 0 if values.pop("case_sensitive", False) else re.IGNORECASE
    patterns = values.pop("patterns", [])
    if wrong := [key for key in ("id", "title", "hint") if not isinstance(values[key], str)]:
        raise TypeError(f"{wrong[0]} is no text")
    if patterns:  # compiled as one: each by itself, too, would be 0.03 s of every command
        try:
            values["pattern"] = re.compile("|".join(patterns), flags)
        except re.error as whole:
            for pattern in patterns:
                try:
                    re.compile(pattern, flags)
                except re.error as error:
                    raise TypeError(f"{pattern!r} is no regular expression: {error}") from error
            raise TypeError(f"its patterns together are no regular expression: {whole}") from whole
    return Rule(**values)


FILES = ("card", "machine", "software", "hub", "training", "peers")
_OF_FILES = {name: load(f"rules/{name}.toml") for name in FILES}
RULES = tuple(rule for rules in _OF_FILES.values() for rule in rules)
EXPLAINING = tuple(rule for rule in RULES if rule.explains)
# Those that may say why a connection to another rank broke. A hub or a package that was only warned of breaks none.
EXPLAINING_A_PEER = tuple(rule for name in ("card", "machine", "training", "peers") for rule in _OF_FILES[name] if rule.explains)
