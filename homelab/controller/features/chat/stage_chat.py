"""One question to a model that no node can hold: the stages of a pipeline are started on its nodes, each loads its own layers, and they end with the answer."""

from __future__ import annotations

import contextlib
import queue
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from homelab.controller.attempt import short_job
from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.node_words import advice
from homelab.controller.base.sanitize import plain_lines
from homelab.controller.base.say import Say
from homelab.controller.facts.reading import read
from homelab.controller.planning.types import NodePlan, Plan
from homelab.controller.remote.decoding import decoded
from homelab.controller.remote.fanout import Fleet, on_all
from homelab.controller.remote.session import Stream
from homelab.controller.run import signals
from homelab.shared.protocol.collective_messages import CollectiveLine, CollectiveRequest
from homelab.shared.protocol.collective_stages import DONE
from homelab.shared.protocol.errors import parts_of
from homelab.shared.protocol.network_messages import FreePortRequest

PROGRAM = ("-m", "homelab.worker.tools.stage_chat")
SILENT_S = 20.0  # the agent says something every second
_LIMIT_S = 1800.0  # a large model is read from a slow disk, and its weights may have to be sent
_SETTLE_S = 3.0  # a rank that has only lost a peer says so before the culprit does
_LAST_WORDS_S = 5.0


def ask(fleet: Fleet, plan: Plan, question: Mapping[str, Any], *, because: str, say: Say) -> tuple[str, dict[str, Any]]:
    """The node of the last stage, and {"answer", "notes"}. `because`: why one node does not answer alone. Ctrl-C ends it everywhere.

    Raises HomelabError with the words of the stage that cannot be loaded, UnreachableError naming the node that is away.
    """
    plan = plan.model_copy(update={"master_port": _port(fleet, plan)})
    job = f"chat-{secrets.token_hex(4)}"
    names = [node.name for node in plan.nodes]
    say(f"loading the model in stages: {layers(plan)}")
    streams: dict[str, Stream] = {}
    watch = _Watch(plan)
    try:
        with signals.held():
            streams, errors = on_all(
                names, lambda node: fleet.agent(node).open("collective", _request(plan, plan.node(node), job, question))
            )
        for error in errors.values():
            raise error
        with short_job.listening(streams) as lines:
            watch.until_done(lines, say)
    finally:
        with signals.held():
            on_all(streams, lambda node: streams[node].close())
            left = short_job.end(fleet, job, [node for node in names if node not in watch.clean], watch.silent(time.monotonic()))
    notes = [f"answered across {len(plan.ranks)} stages, because {because}: {layers(plan)}", *watch.notes()]
    notes += [f"homelab could not check whether processes of it are left on {name}: homelab preflight names them" for name in left]
    return watch.answering_node(), {"answer": watch.answer(), "notes": notes}


def layers(plan: Plan, node: str | None = None) -> str:
    """`layers 0 to 6 on tower, 7 to 11 on laptop`, or those of one node."""
    stages = sorted((rank.stage.number, rank.stage.begin, rank.stage.end, rank.node) for rank in plan.ranks if rank.stage)
    return "layers " + ", ".join(f"{begin} to {end - 1} on {name}" for _, begin, end, name in stages if node in (None, name))


def _port(fleet: Fleet, plan: Plan) -> int:
    """A port that is free on the head. Raises the error of a node that cannot be asked: its layers are needed."""
    names = [node.name for node in plan.nodes]
    known = {node.name for node in fleet.cluster.nodes}
    for name in names:
        if name not in known:
            raise HomelabError(
                f"the model has {layers(plan, name)}, and this node is not in cluster.toml", where=plan.run,
                hint=Hint("add the node to cluster.toml again, or divide the layers again: {}", homelab("recover", plan.run)),
            )  # fmt: skip
    answers, errors = fleet.ask("free-port", FreePortRequest(low=plan.master_port + 1), names=names)
    for name, error in errors.items():
        raise type(error)(f"the model has {layers(plan, name)}, which are needed: {error.message}", where=error.where, hint=error.hint)
    return int(answers[plan.head]["port"])


def _request(plan: Plan, node: NodePlan, job: str, question: Mapping[str, Any]) -> CollectiveRequest:
    body = short_job.request(plan, node.name, job, PROGRAM)
    # The code is that of the agent: the run may be of an older version.
    environment = {key: value for key, value in body.environment.items() if key != "PYTHONPATH"}
    environment |= {"HOMELAB_ATTEMPT": str(plan.attempt), "HOMELAB_PATIENCE_S": str(_LIMIT_S), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return body.replace(environment=environment, limit_s=_LIMIT_S, input=dict(question))


class _Watch:
    """What the ranks say of themselves, until the last stage has the answer."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._begun_s = time.monotonic()
        self._heard = {node.name: self._begun_s for node in plan.nodes}
        self._lines: dict[str, CollectiveLine] = {}
        self._lost: dict[str, str] = {}
        self._trouble_s: float | None = None

    def until_done(self, lines: queue.Queue[short_job.NodeLine], say: Say) -> None:
        """Returns when the answer is there and the nodes have said that nothing is left. Raises HomelabError, UnreachableError."""
        said, done_s = "", None
        while done_s is None or (len(self.clean) + len(self._lost) < len(self._heard) and time.monotonic() < done_s + _LAST_WORDS_S):
            with contextlib.suppress(queue.Empty):
                self._hear(*lines.get(timeout=0.1))
            if done_s is None and self._is_done():
                done_s = time.monotonic()
            if done_s is None:
                self._check(time.monotonic())
                text = self._progress()
                if text != said:
                    say(text)
                said = text

    @property
    def clean(self) -> set[str]:
        """The nodes that have said that nothing is left."""
        return {name for name, line in self._lines.items() if line.ended is not None and not line.ended.left}

    def silent(self, now_s: float) -> set[str]:
        """Nodes that should speak every second and have not for long."""
        return {name for name, heard_s in self._heard.items() if name not in self.clean and now_s - heard_s > SILENT_S}

    def answer(self) -> str:
        """The words of the last stage. Raises HomelabError where it has none."""
        for result in self._results(self.answering_node()):
            if isinstance(result.get("answer"), str):
                return str(result["answer"])
        raise HomelabError(
            "the last stage gave no answer", where=f"node {self.answering_node()}", hint=homelab("preflight --nodes", self.answering_node())
        )

    def answering_node(self) -> str:
        """The node of the last stage."""
        return max((rank.stage.number, rank.node) for rank in self._plan.ranks if rank.stage)[1]

    def notes(self) -> list[str]:
        """On what the stages were computed, where there is something to say."""
        return [
            f"{name}: {plain_lines(str(result['note']))}" for name in self._heard for result in self._results(name) if result.get("note")
        ]

    def _results(self, node: str) -> list[dict[str, Any]]:
        line = self._lines.get(node)
        return [result for rank in line.ranks.values() for result in rank.results or ()] if line else []

    def _hear(self, name: str, line: bytes | None) -> None:
        self._heard[name] = time.monotonic()
        if line is None:
            if name not in self.clean:
                self._lost.setdefault(name, "the connection to this node broke while the model answered")
            return
        try:
            answer = decoded(line)
            if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
                self._lost[name] = plain_lines(str(answer["error"].get("message")))
            else:
                self._lines[name] = read(CollectiveLine, answer)
        except (ValueError, ValidationError):
            self._lost[name] = "it answered with something that homelab's agent never sends"

    def _is_done(self) -> bool:
        """Whether the last stage is: nobody needs the others then, and some may end before they have said that they are."""
        number = max((rank.stage.number, rank.rank) for rank in self._plan.ranks if rank.stage)[1]
        line = self._lines.get(self.answering_node())
        return line is not None and number in line.ranks and line.ranks[number].stage == DONE

    def _is_over(self, name: str) -> bool:
        """Whether torchrun ended on a node before all of its ranks were done."""
        line = self._lines[name]
        return line.ended is not None and (not line.ranks or any(rank.stage != DONE for rank in line.ranks.values()))

    def _progress(self) -> str:
        """What each node is doing."""
        doing = [
            f"{name} {' and '.join(dict.fromkeys(rank.stage for rank in line.ranks.values())) or line.phase}"
            for name, line in self._lines.items()
        ]
        return f"the stages: {', '.join(plain_lines(text) for text in sorted(doing))}"

    def _check(self, now_s: float) -> None:
        """Raises what has gone wrong: first the words of a stage itself, then a node that is away, then whatever a rank has raised."""
        errors = {name: rank.error for name, line in self._lines.items() for rank in line.ranks.values() if rank.error}
        for name, text in errors.items():
            if parts := parts_of(text):
                where = plain_lines(parts.get("where", ""))
                hint = advice(name, parts.get("hint")) or homelab("status", self._plan.run)
                raise HomelabError(parts["message"], where=f"node {name}{', ' if where else ''}{where}", hint=hint)
        away = self._lost | dict.fromkeys(self.silent(now_s), f"this node did not answer for {SILENT_S:.0f} s while the model answered")
        ended = {name: _last_words(line) for name, line in self._lines.items() if self._is_over(name) and name not in errors}
        if self._trouble_s is None and (away or errors or ended):
            self._trouble_s = now_s
        if self._trouble_s is not None and now_s - self._trouble_s > _SETTLE_S:
            for name, why in away.items():
                raise UnreachableError(
                    f"{why}: it has {layers(self._plan, name)}", where=f"node {name}", hint=homelab("preflight --nodes", name)
                )
            # A rank that was killed says nothing itself; the others have lost a peer.
            name, why = next(iter({**ended, **errors}.items()))
            raise HomelabError(
                f"a stage of the model failed: {why}",
                where=f"node {name}, {layers(self._plan, name)}",
                hint=homelab("preflight --nodes", name),
            )
        if now_s - self._begun_s > _LIMIT_S:
            hint = Hint("ask for fewer tokens (--max-new-tokens); {}", homelab("status", self._plan.run))
            raise HomelabError(f"the stages gave no answer within {_LIMIT_S:.0f} s ({self._progress()})", where=self._plan.run, hint=hint)


def _last_words(line: CollectiveLine) -> str:
    """Why torchrun ended on a node before its rank was done."""
    assert line.ended is not None
    for text in reversed(line.ended.log):
        if signal := re.search(r"Signal \d+ \((\w+)\) received by PID \d+", text):
            return f"a rank was ended by {signal.group(1)}"
    words = [text.strip() for text in (*line.ended.log, *line.ended.errors) if text.strip()]
    return words[-1][:500] if words else f"torchrun ended with exit code {line.ended.returncode} and printed nothing"
