"""What the words of a log mean: the rule of one text, and of all that a rank has printed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from homelab.controller.diagnose import endings
from homelab.controller.diagnose.rules import EXPLAINING, EXPLAINING_A_PEER, RULES, Rule
from homelab.controller.diagnose.traces import Raised, last_exceptions, lasting

Match = tuple[Rule, dict[str, str]]

# An exception below this only says that something failed; a line beside it may say what.
_SAYS_ENOUGH = 70
_DISTRIBUTED_TYPES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "RendezvousConnectionError"})
# The last line of a C++ program, for an exception that nobody caught.
_LAST_WORDS = re.compile(r"^\s*what\(\): ")
# What may say of a process that ended at once why it did. A warning that it printed once does not.
_OF_AN_END = tuple(rule for rule in RULES if rule.explains or rule.role != "cause")
_OF_NCCL = re.compile(r"NCCL WARN|libibverbs|libfabric|\bUCX\b")
# What one rank shows while it prepares and the others wait (tqdm's bars of datasets, transformers, huggingface_hub, trl, LLaMA-Factory, axolotl).
_BAR = re.compile(r"\d ?%\|")
_PREPARES = re.compile(
    r"\b(?:Running tokenizer|Tokeniz\w+|Map|Filter|Flattening|Generating \w+ (?:split|examples)|Converting (?:format|data|train)\w*|Packing|Sorting"
    r"|Saving the dataset|Download\w*|Fetching \d+ files|Prepar\w+|Pre-?process\w*|Grouping texts|Loading (?:dataset|checkpoint shards|weights))\b[^|]{0,80}\d ?%\|",
    re.IGNORECASE,
)
_TIMEOUT, _ONE_RANK_PREPARES = (next(rule for rule in RULES if rule.id == name) for name in ("timeout", "one-rank-prepares"))


@dataclass(frozen=True)
class Words:
    """What was said last, and the rule that it meets. `where`: the last place in the person's own files, if there is one; `raised_at`: where it was raised."""

    rule: Rule
    saw: str
    where: str = ""
    raised_at: str = ""
    values: Mapping[str, str] = field(default_factory=dict)


def best_rule(text: str, rules: Iterable[Rule] = RULES) -> Match | None:
    """The most specific rule whose pattern is in this text, with the pattern's named groups."""
    best: Match | None = None
    for rule in rules:
        is_better = best is None or rule.specificity > best[0].specificity
        if is_better and (hit := rule.pattern.search(text)):
            best = rule, {name: value for name, value in hit.groupdict().items() if value}
    return best


def best_line(lines: Sequence[str], rules: Iterable[Rule] = RULES) -> Words | None:
    """The most specific rule over all lines; of equal ones the first line."""
    best: Words | None = None
    rules = tuple(rules)
    for line in lines:
        match = best_rule(line, rules)
        if match and (best is None or match[0].specificity > best.rule.specificity):
            best = Words(match[0], line.strip(), values=match[1])
    return best


def judge(lines: Sequence[str], beside: Sequence[str] = (), *, was_ended: bool = False) -> Words | None:
    """The last exception, else the line that says most, of one rank's stderr (`lines`) and stdout (`beside`).

    `was_ended`: by a signal, or with its machine. It could not say why, so a line counts only by a rule that `explains`.
    Who waited in vain, and shows a bar of a preparation last, waited for one that another rank had not ended.
    """
    words = exception(lines, beside) or _said(lines, beside, was_ended)
    if words is not None and words.rule is _TIMEOUT and preparing(lines):
        return replace(words, rule=_ONE_RANK_PREPARES)
    return words


def has_exception(lines: Sequence[str]) -> bool:
    """Whether `judge` speaks of an exception."""
    return bool(last_exceptions(lines))


def exception(lines: Sequence[str], beside: Sequence[str] = ()) -> Words | None:
    """The last exception among the lines of stderr, by the words that say most; None without one. `beside`: lines of stdout.

    Of a chain (raised from, or while handling) the most specific counts. One that says little is explained by a line that was printed beside
    it, by a rule that `explains`.
    """
    judged = [_of_raised(raised) for raised in last_exceptions(lines)]
    if not judged:
        return None
    best = max(judged, key=lambda words: (words.rule.role == "cause", words.rule.specificity))
    if best.rule.role == "cause" and best.rule.specificity >= _SAYS_ENOUGH:
        return best
    aside = explanation(lines, beside, EXPLAINING if best.rule.role == "cause" else EXPLAINING_A_PEER)
    if aside is not None and (best.rule.role != "cause" or aside.rule.specificity > best.rule.specificity):
        return Words(aside.rule, aside.saw, best.where, best.raised_at, aside.values)
    return best


def explanation(lines: Sequence[str], beside: Sequence[str] = (), rules: Iterable[Rule] = EXPLAINING) -> Words | None:
    """A line that says why, although it is only printed and not raised: a warning of CUDA, or a line of NCCL on either stream."""
    return best_line((*lasting(lines), *(line for line in beside if _OF_NCCL.search(line))), rules)


def preparing(lines: Sequence[str]) -> str:
    """The last progress bar among these lines, where it is one of preparing data, a download or a model's loading; else empty."""
    shown = [part for line in lines for part in line.split("\r")]
    last = next((part for part in reversed(shown) if _BAR.search(part)), "")
    return last.strip()[:160] if _PREPARES.search(last) else ""


def _said(lines: Sequence[str], beside: Sequence[str], was_ended: bool) -> Words | None:
    """Of a rank that raised nothing: the line that says most; a line of NCCL counts on either stream."""
    kept = lasting(lines)
    last = [line for line in kept if _LAST_WORDS.search(line)]
    said = (best_line(last), best_line(kept, _OF_AN_END)) if was_ended else (best_line(kept),)
    found = [words for words in (*said, explanation((), beside)) if words is not None]
    return max(found, key=lambda words: words.rule.specificity, default=None)


def first_line(text: str) -> str:
    """Of an exception with a long message, what matters: its first line, and the next one where the first has no words."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()] or [""]
    return f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


def _of_raised(raised: Raised) -> Words:
    rule, values = _rule_of(raised)
    return Words(rule, raised.text, raised.where, raised.raised_at, {**values, "message": first_line(raised.text)})


def _rule_of(raised: Raised) -> Match:
    at = f"\n@ {raised.raised_at} in {' > '.join(raised.functions)}"
    match = best_rule(raised.text + at)
    if raised.more and (match is None or match[0].specificity < _SAYS_ENOUGH):
        longer = best_rule(f"{raised.text}\n{raised.more}{at}")
        match = longer if longer is not None and longer[0].role == "cause" else match
    if match is not None:
        return match
    is_distributed = raised.type.rsplit(".", 1)[-1] in _DISTRIBUTED_TYPES
    return endings.DISTRIBUTED_ERROR if is_distributed else endings.PYTHON_ERROR, {}
