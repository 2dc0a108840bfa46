"""Each rank and each node judged by itself: what it said last, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.node_words import advice
from homelab.controller.config.cluster import Node
from homelab.controller.diagnose import endings, matching
from homelab.controller.diagnose import unconnected as connections
from homelab.controller.diagnose.matching import Words, first_line
from homelab.controller.diagnose.rules import RULES, Rule
from homelab.controller.diagnose.traces import ChildFailure, child_failures
from homelab.controller.run.state import node_part
from homelab.shared.protocol.phases import BEFORE_TRAINING, DONE
from homelab.shared.protocol.rank_messages import RankError, RankReply
from homelab.shared.protocol.run_messages import Reply, RunReply

# What a stop sends, first politely and then not: on a node that was stopped these say nothing.
_STOP_SIGNALS = (2, 9, 15)
_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class Suspect:
    """One thing that went wrong, judged by itself."""

    rule: Rule
    node: str
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    time_s: float = math.inf
    saw: str = ""
    where: str = ""
    raised_at: str = ""  # where it is not `where`, which is the person's own place then
    values: Mapping[str, str] = field(default_factory=dict)
    own_hint: str = ""
    needs_launch: bool = False  # what `own_hint` says makes it another training
    said_by: str = ""  # whose words `saw` are, where they are not those of the place itself

    @property
    def tier(self) -> int:
        """0 a reason, 1 a node that is gone, 2 an ending without a word, 3 waited in vain, 4 lost its peer."""
        if self.rule.role != "cause":
            return 3 if self.rule.role == "symptom" else 4
        if self.rule in endings.OF_A_NODE:
            return 1
        return 0 if self.rule.specificity >= 50 else 2

    @property
    def order(self) -> tuple[int, float, int]:
        """The smallest is the culprit. torchrun's own times are whole seconds."""
        return self.tier, math.floor(self.time_s) if math.isfinite(self.time_s) else math.inf, -self.rule.specificity


def of_node(node: str, reply: Reply, silent_ranks: Collection[int]) -> Iterator[Suspect]:
    """What can be held against this node and its ranks, by their own words. `reply.run` must be there."""
    run = reply.run
    assert run is not None
    part = node_part(run, run.attempt)
    if run.exit is not None and run.exit.alone:  # lines that its ranks printed during the stop prove nothing
        yield Suspect(endings.ALONE, node, saw=run.exit.alone)
        return
    failures = {failure.rank: failure for failure in child_failures(run.torchrun_tail, run.exit.ended_at if run.exit else None)}
    has_words = False
    for rank, rank_reply in sorted(run.ranks.items()):
        if rank in silent_ranks:
            age_s = reply.time - rank_reply.heartbeat.time if rank_reply.heartbeat else math.nan
            yield Suspect(endings.SILENT, node, rank, saw=f"its last sign of life was {age_s:.0f} s old")
            has_words = True
        elif part in ("failed", "stopped", "vanished") or rank_reply.error:
            for suspect in _of_rank(node, rank, rank_reply, failures, run):
                has_words = True
                yield suspect
    if part == "vanished":
        ending = endings.NODE_RESTARTED if run.rebooted else endings.VANISHED
        yield Suspect(ending, node, saw="the agent is gone and wrote down no end")
    if part == "failed" and not failures:
        yield from _of_torchrun(node, run, has_words=has_words)


def _of_rank(node: str, rank: int, reply: RankReply, failures: Mapping[int, ChildFailure], run: RunReply) -> Iterator[Suspect]:
    """What one rank's own words and its exit say, the worker's own account before all others. `failures`: of the ranks of this node."""
    failure = failures.get(rank)
    is_stopped = node_part(run, run.attempt) == "stopped"
    code, signal = (failure.exit_code, failure.signal) if failure else (None, None)
    time_s = (failure.time_s if failure else None) or (run.exit.ended_at if run.exit else None) or math.inf

    def suspect(words: Words) -> Suspect:
        return Suspect(words.rule, node, rank, code, signal, time_s, words.saw, words.where, words.raised_at, words.values)

    lines = reply.log_tail.stderr or (failure.traceback if failure else ())
    words = matching.judge(lines, reply.log_tail.stdout, was_ended=failure is None or signal is not None)
    raised = words if matching.has_exception(lines) else None
    if reply.error is not None:
        yield replace(
            suspect(_account(reply.error, raised)), own_hint=advice(node, reply.error.hint), needs_launch=reply.error.needs_launch
        )
        return
    # No program dies of its exception by this signal, and nothing else on its node had failed before.
    is_killed = failure is not None and failure.signal == 9 and failure.is_root and not is_stopped
    if raised is not None and not is_killed:
        # A program that died of its exception ends with an exit code: after a signal that exception was survived.
        ending = endings.OF_SIGNAL.get(signal or 0, endings.EXIT_CODE)
        was_survived = raised.rule.role == "cause" and raised.rule.specificity < ending.specificity
        if not was_survived or is_stopped:
            if not is_stopped or raised.rule.role == "cause":
                yield suspect(raised)
            return
    if is_stopped and (signal in _STOP_SIGNALS or failure is None):
        return
    if failure is None:
        if failures:  # homelab's own launcher lists the ranks that failed, not those that it then ended
            if not reply.heartbeat or reply.heartbeat.phase != DONE:
                yield suspect(Words(_LOST, "ended after another rank of its node had failed"))
        elif words is not None:
            yield suspect(words)
        return
    said = _ending(failure, words)
    if said is not None:
        yield suspect(said)


def _ending(failure: ChildFailure, words: Words | None) -> Words | None:
    """What the exit of a rank says that raised nothing, or survived it; None of one that ended well. `words`: what it had printed."""
    code, signal = failure.exit_code, failure.signal
    if code == 0:
        return None
    if signal == 15 or (signal in _STOP_SIGNALS and not failure.is_root):
        return Words(_LOST, f"ended by torchrun (signal {signal}) after another rank had failed")
    ending = endings.EXIT_CODE if signal is None else endings.OF_SIGNAL.get(signal, endings.OTHER_SIGNAL)
    if signal == 9:  # what it had printed was survived, unless it tells of the kill
        if words is None or words.rule.id == "oom-killer":
            return words or Words(ending, f"torchrun: signal {signal}")
        return Words(ending, f"torchrun: signal {signal}; the last that it had printed of an error: {first_line(words.saw)}")
    # An abort and a bare exit code only say that it ended; whatever was printed before says more.
    if words is not None and (ending.specificity < 50 or words.rule.specificity > ending.specificity):
        return words
    return Words(ending, f"torchrun: signal {signal}" if signal is not None else f"torchrun: exit code {code}")


def _account(error: RankError, raised: Words | None) -> Words:
    """The worker's own account. Of an error that it did not foresee it has one line, and its log says more."""
    match = matching.best_rule(error.message)
    if not error.hint and raised is not None and (match is None or raised.rule.specificity > match[0].specificity):
        is_known = raised.rule not in (endings.PYTHON_ERROR, endings.DISTRIBUTED_ERROR)
        rule = raised.rule if is_known else endings.WORKER_ERROR
        return Words(rule, error.message, error.where, raised.raised_at, {**raised.values, "message": first_line(error.message)})
    rule, values = match or (endings.WORKER_ERROR, {})
    return Words(rule, error.message, error.where, values={**values, "message": first_line(error.message)})


def _of_torchrun(node: str, run: RunReply, *, has_words: bool) -> Iterator[Suspect]:
    """torchrun itself failed: it could not start, could not meet the others, or was killed."""
    assert run.exit is not None
    time_s = run.exit.ended_at or math.inf
    code, signal = run.exit.returncode, run.exit.signal
    if run.exit.error:
        rule, values = matching.best_rule(run.exit.error) or (endings.NOT_STARTED, {})
        yield Suspect(rule, node, None, code, signal, time_s, run.exit.error, values={**values, "message": run.exit.error})
        return
    words = matching.judge(run.torchrun_tail, was_ended=signal is not None)
    if words is None and signal is not None:
        words = Words(endings.TORCHRUN_KILLED, f"torchrun: signal {signal}")
    if words is None and not has_words:
        said = next((line for line in reversed(run.torchrun_tail) if line.strip()), f"torchrun: {run.exit}")
        words = Words(endings.EXIT_CODE, said)
    if words is not None:
        yield Suspect(words.rule, node, None, code, signal, time_s, words.saw, words.where, words.raised_at, words.values)


def silent(replies: Mapping[str, Reply], attempt: int, heard: Sequence[Suspect]) -> Iterator[Suspect]:
    """When everybody else (`heard`) only says that a peer was lost: the one rank that says nothing at all, or that still prepared.

    Of several silent ranks it is the one whose heartbeat is at an earlier step than all others'; otherwise no rank is accused. One that loads
    or still waits for connections gives no sign by its nature: of that one it is only said that it had not begun.
    """
    steps: dict[tuple[str, int], tuple[int, float]] = {}
    phases: dict[tuple[str, int], str] = {}
    shown: dict[tuple[str, int], str] = {}
    waited = {(suspect.node, suspect.rank) for suspect in heard if suspect.rule.role == "symptom"}
    for node, reply in replies.items():
        if reply.run and reply.run.attempt == attempt:
            for rank, rank_reply in reply.run.ranks.items():
                beat = rank_reply.heartbeat
                steps[node, rank] = (beat.step, reply.time - beat.time) if beat else (-1, math.nan)
                phases[node, rank] = beat.phase if beat else "absent"
                tail = rank_reply.log_tail
                if (node, rank) not in waited and (line := matching.preparing((*tail.stdout, *tail.stderr))):
                    shown[node, rank] = line
    begun = {place for place, phase in phases.items() if phase not in ("absent", *BEFORE_TRAINING)}
    prepares = {place: line for place, line in shown.items() if place not in begun}
    yield from (Suspect(endings.PREPARING, *place, saw=f"the last that it showed: {line}") for place, line in prepares.items())
    heard_ranks = {suspect.rank for suspect in heard if suspect.rank is not None}
    quiet = [(node, rank) for node, rank in steps if rank not in heard_ranks and (node, rank) not in prepares]
    if len(quiet) > 1:
        behind = min(step for step, _ in steps.values())
        quiet = [place for place in quiet if steps[place][0] == behind]
        if sum(step == behind for step, _ in steps.values()) != 1:
            return
    waits_for_preparation = any(suspect.rule.id == "one-rank-prepares" for suspect in heard)
    for node, rank in quiet if not prepares else ():
        step, age_s = steps[node, rank]
        saw = f"its last sign of life was at step {step}, {age_s:.0f} s ago" if step >= 0 else "it never gave a sign of life"
        ending = endings.SILENT
        if phases[node, rank] in BEFORE_TRAINING:
            ending, saw = endings.NOT_BEGUN, f"it was {phases[node, rank]}, and its last sign of life was {age_s:.0f} s old"
        elif waits_for_preparation and step < 0:
            ending = endings.PREPARING
        yield Suspect(ending, node, rank, saw=saw)


def absent(unreachable: Mapping[str, str], ways: Mapping[str, str], *, is_anybody_heard: bool) -> Iterator[Suspect]:
    """The nodes that could not be asked: the obstacle decides what can be said, and what fixes it."""
    own = endings.OWN_NETWORK
    if unreachable and not is_anybody_heard and all(own.pattern.search(why) for why in unreachable.values()):
        yield Suspect(own, "", saw="; ".join(f"{node}: {first_line(why)}" for node, why in unreachable.items()))
        return
    for node, why in unreachable.items():
        rule = next((rule for rule in (endings.NOT_IN_CLUSTER, endings.HOST_KEY) if rule.pattern.search(why)), endings.UNREACHABLE)
        if rule is endings.NOT_IN_CLUSTER:
            yield Suspect(rule, node, saw=why, own_hint=ways.get(node, ""))
        else:
            default = Hint("wake it or check its cable, then: {}", homelab("preflight"))
            if rule is endings.HOST_KEY:
                default = Hint("if you know why: {} names the command that forgets the old key", homelab("trust", node))
            yield Suspect(rule, node, saw=why, values={"way": ways.get(node) or default})


def unconnected(replies: Mapping[str, Reply], attempt: int, nodes: Mapping[str, Node]) -> Iterator[Suspect]:
    """The node that the others could not connect to, where there is one."""
    verdict = connections.find(replies, attempt, nodes)
    if verdict is not None:
        first = min(verdict.accusations, key=lambda one: one.time_s or math.inf)
        who = list(dict.fromkeys(person(one.node, one.rank) for one in verdict.accusations))
        values = {"who": " and ".join([", ".join(who[:-1]), who[-1]] if len(who) > 1 else who), "target": verdict.target}
        yield Suspect(
            endings.UNCONNECTED,
            verdict.node,
            time_s=first.time_s or math.inf,
            saw=first.text,
            values=values,
            said_by=person(first.node, first.rank),
        )


def person(node: str, rank: int | None) -> str:
    """ "rank 1 on tower", or the node alone."""
    return f"rank {rank} on {node}" if rank is not None else node


_LOST = next(rule for rule in RULES if rule.id == "connection-lost")
