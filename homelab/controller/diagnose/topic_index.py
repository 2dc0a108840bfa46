"""The topics of `homelab explain`, which are in the folder topics/, and the topic that a diagnosis belongs to. Pure data and look-ups."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from dataclasses import MISSING, dataclass, fields

from homelab.controller.diagnose import data_file, endings, matching
from homelab.controller.diagnose.rules import Rule


@dataclass(frozen=True)
class Topic:
    """One way a training on machines at home goes wrong.

    `seen` is what a person meets (of a log, as it is printed there). `do` are the steps, the most useful first; a command
    among them stands as it is typed, with NODE, RUN, RECIPE and ADDRESS for the reader's own. `checks` are ids of preflight's checks
    that are about this (each belongs to one topic), `checks_too` others that may find it; `rules` are ids of `rules` and `endings`
    that lead here. `words` are further words a person may look it up by. `says` is a regular expression of messages that mean
    this topic although their rule is a general one; `lines` is one of lines that homelab itself writes of a run. `next_command` is
    what a reader may type first, where it is not the check that finds it.
    """

    id: str
    title: str
    seen: tuple[str, ...]
    cause: str
    do: tuple[str, ...]
    checks: tuple[str, ...] = ()
    checks_too: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    says: str = ""
    lines: str = ""
    next_command: str = ""


def load_topics(name: str) -> tuple[str, tuple[Topic, ...]]:
    """(heading, topics) of the file homelab/controller/diagnose/topics/NAME.toml. The line breaks of `cause` are blanks.

    Raises InputError with the file and the line of a topic that is none.
    """

    def topic(entry: dict[str, str | list[str]]) -> Topic:
        if wrong := [key for key, value in entry.items() if not isinstance(value, (str, list))]:
            raise TypeError(f"{wrong[0]} is neither a text nor a list of texts")
        values = {key: tuple(value) if isinstance(value, list) else " ".join(value.split()) for key, value in entry.items()}
        return Topic(**values)  # type: ignore[arg-type]

    file = f"topics/{name}.toml"
    needed = [field.name for field in fields(Topic) if field.default is MISSING]
    return data_file.load(file)["heading"], data_file.each(file, "topics", topic, [field.name for field in fields(Topic)], needed)


FILES = ("network", "gpu", "machine", "software", "training", "recovery")  # in the order in which they are listed
# Heading -> topics.
GROUPS = dict(load_topics(name) for name in FILES)
TOPICS: tuple[Topic, ...] = tuple(topic for group in GROUPS.values() for topic in group)
_BY_ID = {topic.id: topic for topic in TOPICS}
_BY_RULE = {rule: topic for topic in TOPICS for rule in topic.rules}
_BY_CHECK = {check: topic for topic in TOPICS for check in topic.checks}

# These rules only say that the program complained; its own words may name a topic.
_GENERAL = ("worker-error", "python-error")


def of_rule(rule: str, message: str = "") -> Topic | None:
    """The topic of a diagnosis: of its rule's id, or, where the rule is a general one, of what the program said."""
    if rule in _GENERAL and message:
        for topic in TOPICS:
            if topic.says and re.search(topic.says, message, re.IGNORECASE):
                return topic
    return _BY_RULE.get(rule)


def find(query: str) -> tuple[Topic, ...]:
    """The topics meant: one where it is clear, several to choose from, or none.

    `query` may be the id of a topic, of a rule, of a check ("network.mtu") or of a subject of checks ("gpu"), a line of a log or of a run's events, or words.
    """
    query = query.strip()
    name = query.lower()
    exact = _BY_ID.get(name) or _BY_RULE.get(name)
    if exact is not None:
        return (exact,)
    if name in _BY_CHECK:
        return (_BY_CHECK[name],)
    if re.fullmatch(r"(?:runtime|value|type|attribute|key|index|os)?(?:error|exception):?", name):
        return ()  # the name of an exception alone says nothing
    rule = _rule_of(query)
    if rule is not None and rule.id in _BY_RULE:
        return (_BY_RULE[rule.id],)
    own = tuple(topic for topic in TOPICS if topic.lines and re.search(topic.lines, query, re.IGNORECASE))
    if own:
        return own
    subject, _, check = name.partition(".")
    of_subject = tuple(topic for topic in TOPICS if any(check.partition(".")[0] == subject for check in topic.checks))
    of_words = () if check and of_subject else _of_words(query)  # a check that no topic has: those of its subject
    return tuple(topic for topic in TOPICS if topic in of_subject or topic in of_words)


def nearest(line: str, most: int = 3) -> tuple[Topic, ...]:
    """The topics that share the most telling words with a line that no rule knows, the nearest first; none where they share no word of a topic's own."""
    asked = {word for word in _words(line) if len(word) > 3} - _COMMON
    scores = {topic.id: sum(math.log(len(TOPICS) / _USES[word]) for word in asked & words) for topic, words in _OWN_WORDS}
    near = sorted((topic for topic in TOPICS if scores[topic.id] >= _NEAR), key=lambda topic: -scores[topic.id])
    return tuple(near[:most])


def _rule_of(query: str) -> Rule | None:
    """The rule that `homelab why` would judge by, if these were a rank's last lines; else that of an ending in torchrun's words."""
    words, whole = matching.judge(query.splitlines()), matching.best_rule(query)
    rules = [*([words.rule] if words else []), *([whole[0]] if whole else [])]
    known = [rule for rule in rules if rule.id not in _GENERAL]
    if known:
        return max(known, key=lambda rule: rule.specificity)
    ending = matching.best_rule(query, endings.IN_WORDS)
    return ending[0] if ending else None


def vocabulary() -> tuple[str, ...]:
    """All ids and the words of all titles: what a mistyped word may have meant."""
    words = {word for topic in TOPICS for word in _words(topic.title) if len(word) > 3}
    return (*_BY_ID, *sorted(words - _BY_ID.keys()))


def _of_words(query: str) -> tuple[Topic, ...]:
    """Topics that have all these words: in the id, in the title or among `words`; else in what is seen; else in the cause."""
    words = _words(query)
    if not words:
        return ()
    for depth in range(3):
        topics = tuple(topic for topic in TOPICS if words <= _words_of(topic.id, depth))
        if topics:
            return topics
    return ()


@functools.cache
def _words_of(name: str, depth: int) -> frozenset[str]:
    """The words of a topic that are looked through first (0), then also (1), then at last (2)."""
    topic = _BY_ID[name]
    texts = (topic.id, topic.title, *topic.words, *(topic.seen if depth > 0 else ()), *((topic.cause,) if depth > 1 else ()))
    return frozenset(_words(*texts))


def _words(*texts: str) -> set[str]:
    """Words in lower case, as they stand and without their punctuation: "Wi-Fi" is wi-fi, wifi, wi and fi."""
    variants: set[str] = set()
    for text in texts:
        for word in text.lower().split():
            word = word.strip(".,:;()[]\"'`!?")
            variants |= {word, re.sub(r"[\W_]+", "", word), *re.split(r"[\W_]+", word)}
    return variants - {""}


_OWN_WORDS = tuple((topic, _words(topic.id, topic.title, *topic.words, *topic.seen)) for topic in TOPICS)
_USES = Counter(word for _, words in _OWN_WORDS for word in words)
# Words of every second message, which are no sign of a topic.
_COMMON = frozenset(
    re.findall(
        r"\w+",
        """error errors valueerror runtimeerror oserror typeerror attributeerror this that than then with were must match many value values size does have been
        from when other another some more most none into while same expected object attribute loading initialized their there which about like found called
        cannot could should would failed using used file line name type return code given python python3 site packages local home torch model data node rank""",
    )
)
_NEAR = 3.0  # one word that a handful of topics have, or two that more have
