"""Nodes without machines: the node's real verbs, run in this process on a folder of their own, behind the real `Agent` and `Fleet`.

fleet = FakeFleet(tmp_path)                  # tower, laptop, oldtower; a `Fleet` wherever one is wanted
fleet.nodes["laptop"].is_off = True          # it cannot be reached
fleet.nodes["tower"].answers["poll"] = {...}  # instead of the real verb: an answer, a HomelabError, or a function of the request
fleet.asked                                  # [("tower", "poll"), ...] in the order of asking
fleet.nodes["tower"].streams["follow"] = [{...}]  # the lines of every stream that is opened from now on
fleet.nodes["tower"].cut()                   # its open streams break, and it cannot be reached
"""

from __future__ import annotations

import copy
import io
import json
import queue
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.remote.agent import Agent
from homelab.controller.remote.bootstrap import AGENT_MARK, ANSWER_MARK
from homelab.controller.remote.fanout import Fleet
from homelab.controller.remote.session import Completed, Stream
from homelab.node import verbs
from homelab.shared.protocol import message
from tests import builders


class FakeStream:
    """A verb that stays open on a fake node: the recorded lines, then what `say` adds, until it is closed or cut."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self.written: list[bytes] = []
        self.is_closed = False
        self._lines: queue.SimpleQueue[bytes | OSError] = queue.SimpleQueue()
        for line in (ANSWER_MARK.encode(), AGENT_MARK.encode(), *lines):
            self._lines.put(line)

    def say(self, line: bytes) -> None:
        """One line more; b"" is the end."""
        self._lines.put(line)

    def cut(self) -> None:
        """Break the connection behind the lines that were said."""
        self._lines.put(ConnectionResetError("connection reset by peer"))

    def readline(self, timeout_s: float) -> bytes:
        """The next line. Raises TimeoutError where none comes, OSError where the connection is cut."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(line, OSError):
            raise line
        return line

    def write(self, line: bytes) -> None:
        """What the controller says is kept in `written`."""
        self.written.append(line)

    def close(self) -> None:
        """The controller has enough of it."""
        self.is_closed = True


class FakeNode:
    """A `Session` to a node that is a folder. `answers` (verb -> answer, HomelabError, or function of the request) goes before its verbs.

    `streams`: verb -> the lines that a stream of it says (JSON objects, or bytes as they are); `opened`: the streams so far.
    """

    def __init__(self, name: str, workdir: Path, asked: list[tuple[str, str]] | None = None) -> None:
        self.node = self.name = name
        self.workdir = workdir
        self.is_off = False
        self.answers: dict[str, Any] = {}
        self.streams: dict[str, list[Any]] = {}
        self.opened: list[FakeStream] = []
        self.requests: list[dict[str, Any]] = []
        self._asked = [] if asked is None else asked

    def run(
        self, command: str, *, stdin: bytes | BinaryIO = b"", timeout_s: float, stdout: BinaryIO | None = None, head: bytes = b""
    ) -> Completed:
        """One verb of the node's program. Raises UnreachableError while the node is off."""
        if self.is_off:
            raise UnreachableError("no route to host", where=f"node {self.name}", hint="wake it")
        verb, request = self._begun(command, head, timeout_s=timeout_s)
        body = io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin
        answer = io.BytesIO(f"{ANSWER_MARK}\n{AGENT_MARK}\n".encode())
        answer.seek(0, io.SEEK_END)
        code = self._answer(verb, request, body, answer)
        if stdout is None:
            return Completed(code, answer.getvalue(), b"")
        stdout.write(answer.getvalue())
        return Completed(code, b"", b"")

    def open(self, command: str, *, stdin: bytes = b"") -> Stream:
        """One verb that stays open; one without lines in `streams` is refused, as a node refuses what it does not know.

        Raises UnreachableError while the node is off.
        """
        if self.is_off:
            raise UnreachableError("no route to host", where=f"node {self.name}", hint="wake it")
        verb, _ = self._begun(command, stdin)
        refused = [{"error": verbs.refusal_of(ValueError(f"this agent does not know {verb!r}"))}, b""]
        stream = FakeStream(_as_bytes(line) for line in self.streams.get(verb, refused))
        self.opened.append(stream)
        return stream

    def say(self, line: Any) -> None:
        """One line more in the stream that was opened last."""
        self.opened[-1].say(_as_bytes(line))

    def cut(self) -> None:
        """Nothing reaches the node any more: its streams break, and it is off."""
        self.is_off = True
        for stream in self.opened:
            stream.cut()

    def close(self) -> None:
        """There is nothing to close."""

    def _begun(self, command: str, head: bytes, **details: Any) -> tuple[str, dict[str, Any]]:
        """The verb and the request of a command, written down."""
        wanted = re.search(r"-m homelab\.node (\S+) ", command)
        assert wanted is not None, f"the fake node knows only verbs: {command}"
        verb, request = wanted[1], json.loads(head)
        self._asked.append((self.name, verb))
        self.requests.append({"verb": verb, **details, **request})
        return verb, request

    def _answer(self, verb: str, request: dict[str, Any], body: BinaryIO, out: BinaryIO) -> int:
        """As `homelab.node.verbs.answer`: the answer or the refusal as one line of JSON, and the exit code."""
        try:
            if verb in self.answers:
                answer = self.answers[verb]
                answer = answer(request) if callable(answer) else answer
                if isinstance(answer, HomelabError):
                    raise answer
            else:
                answer = verbs.call(verb, request, body, out)
                if answer is None:
                    return 0
        except (ValueError, KeyError, OSError) as error:
            out.write(json.dumps({"error": verbs.refusal_of(error)}).encode() + b"\n")
            return 1
        out.write(json.dumps(answer, default=message.fields).encode() + b"\n")
        return 0


def ask_node(verb: str, request: dict[str, Any], stream: Any = None) -> Any:
    """What the node's program answers to this request. `stream`: the body that it reads, or where it writes one."""
    return verbs.call(verb, request, stream, stream)


def _as_bytes(line: Any) -> bytes:
    return line if isinstance(line, bytes) else json.dumps(line, default=message.fields).encode()


class FakeFleet(Fleet):
    """A fleet of `FakeNode`s; each has the folder of its name in `root` as its workdir."""

    def __init__(self, root: Path, names: Iterable[str] = builders.NAMES, cluster: Cluster | None = None) -> None:
        names = tuple(names)
        workdirs = {name: {"workdir": str(root / name)} for name in names}
        super().__init__(cluster or builders.cluster(names, nodes=workdirs))
        self.asked: list[tuple[str, str]] = []
        self.nodes = {name: FakeNode(name, root / name, self.asked) for name in names}
        self._agents = {name: Agent(self.cluster.node(name), node) for name, node in self.nodes.items()}

    def only(self, names: Iterable[str]) -> FakeFleet:
        """These nodes alone."""
        part = copy.copy(self)
        part.cluster = self.cluster.only(tuple(names))
        return part

    def agent(self, name: str) -> Agent:
        """This node's agent. Raises UnreachableError while the node is off, or when it was given up."""
        self._refuse_given_up(name)
        if self.nodes[name].is_off:
            raise UnreachableError("no route to host", where=f"node {name}", hint="wake it")
        return self._agents.get(name) or Agent(self.cluster.node(name), self.nodes[name])

    def verbs(self, *verbs: str) -> list[str]:
        """Which nodes were asked one of these verbs, in the order of asking."""
        return [name for name, verb in self.asked if verb in verbs]

    def answer(self, verb: str, answer: Any, names: Iterable[str] | None = None) -> FakeFleet:
        """Nodes (all by default) answer `verb` with this; see `FakeNode.answers`."""
        for name in self.nodes if names is None else names:
            self.nodes[name].answers[verb] = answer
        return self

    def replace_connections(self, monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
        """Every `Fleet` and every status stream that the product opens now leads to these nodes."""

        def connect(cluster: Cluster, node: Node) -> Agent:
            return Agent(node, self.nodes[node.name])

        monkeypatch.setattr("homelab.controller.remote.fanout.connect", connect)
        monkeypatch.setattr("homelab.controller.features.supervise.status_streams.connect", connect)
        return self
