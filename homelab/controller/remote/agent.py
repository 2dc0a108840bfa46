"""The agent of one node as a set of questions: ships itself where it is missing, asks, and turns refusals into errors."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, cast

from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.base.hint import homelab
from homelab.controller.base.sanitize import plain, plain_lines
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.facts.node_commands import on_node
from homelab.controller.remote import agent_errors, answers, question_line, ship
from homelab.controller.remote.bootstrap import AGENT_MARK, ANSWER_MARK, agent_command, unpack_command
from homelab.controller.remote.decoding import decoded
from homelab.controller.remote.question_line import QuestionLine
from homelab.controller.remote.session import Completed, CrowdedError, Session, Stream
from homelab.shared.protocol.request import Request
from homelab.shared.protocol.verb_table import VERBS

_MARK = ANSWER_MARK.encode() + b"\n"
_AGENT_MARK = AGENT_MARK.encode() + b"\n"
_OPEN_TIMEOUT_S = 20.0
_MOST_ANSWER_BYTES = 64 << 20  # with what a shell prints on start, of which only the end is kept
_KEPT_BYTES = 1 << 20
_MOST_BYTES = 4 << 20  # of a greeting, and of bytes that are fetched where nobody knows how many there are
# A run's own file, which must not change; texts that are made harmless where they are shown (`homelab.controller.remote.poll_reply`).
_AS_IT_IS = ("describe", "poll", "chat")
_MOST_OF_REFUSAL_BYTES = 64 << 10
_CODE_MISSING = 97

Asked = Request | Mapping[str, Any] | None
"""A request; of the verbs that declare none, and of none but the node, its fields."""


def connect(cluster: Cluster, node: Node) -> Agent:
    """Open the way to a node. Raises UnreachableError."""
    if node.host == "local":
        from homelab.controller.remote.local import LocalSession

        return Agent(node, LocalSession(node))
    from homelab.controller.remote.ssh import SshSession

    return Agent(node, SshSession(cluster, node))


class Agent:
    """Questions to one node. Every answer is a dict; a refusal raises HomelabError with the node's own words."""

    def __init__(self, node: Node, session: Session) -> None:
        self.node = node
        self.session = session
        self._line: QuestionLine | None = None
        self._asking = threading.Lock()
        self._is_crowded = False  # there is no room for a line beside other questions
        self._has_answered = ""  # the command of a line of questions: with this Python and this code it has answered

    def ask(self, verb: str, request: Asked = None, *, timeout_s: float = 20.0) -> dict[str, Any]:
        """One question, one answer. Raises UnreachableError (no answer) or HomelabError (refused)."""
        return self._answer(verb, self._run(verb, request, b"", timeout_s, None))

    def send(self, verb: str, request: Asked, body: bytes | BinaryIO, *, timeout_s: float = 600.0) -> dict[str, Any]:
        """A question with a body of bytes (receive-file, receive-checkpoint)."""
        return self._answer(verb, self._run(verb, request, body, timeout_s, None))

    def fetch(self, verb: str, request: Asked, into: BinaryIO, *, most_bytes: int = _MOST_BYTES, timeout_s: float = 600.0) -> None:
        """A question answered with raw bytes (send-checkpoint), written to `into`. Raises HomelabError (refused), also where more come than may."""
        answer = _AfterMark(into, most_bytes, self._endless)
        completed = self._run(verb, request, b"", timeout_s, cast(BinaryIO, answer))
        if completed.returncode != 0:
            said = None
            with contextlib.suppress(ValueError):
                said = decoded(bytes(answer.held or b""), VERBS[verb].most_values)
            self._raise_refusal(said)
            raise agent_errors.error(self.node, f"it could not send its answer ({verb})", completed)
        answer.pass_on_held()

    def open(self, verb: str, request: Asked) -> Stream:
        """A verb that stays until its stdin is closed (listen). The code must be there: ask something first."""
        return self._opened(self._command(verb), self._request(verb, request), verb, _OPEN_TIMEOUT_S)

    def _opened(self, command: str, request: bytes, verb: str, timeout_s: float) -> Stream:
        stream, deadline = self.session.open(command, stdin=request), time.monotonic() + timeout_s
        try:
            while line := stream.readline(max(0.0, deadline - time.monotonic())):
                if line.endswith(AGENT_MARK.encode()):
                    return stream
        except (TimeoutError, OSError):
            pass
        stream.close()
        raise HomelabError(
            f"the agent did not start '{verb}'", where=agent_errors.where_of(self.node), hint=f"by hand: {on_node(self.node, 'true')}"
        )

    def unpack(self, place: str, archive: bytes, *, timeout_s: float = 60.0) -> None:
        """Put an archive of code (`homelab.controller.remote.ship`) into the folder that is named by its content, unless it is there."""
        completed = self.session.run(unpack_command(self.node.python, place), stdin=archive, timeout_s=timeout_s)
        if completed.returncode != 0:
            raise agent_errors.error(self.node, "homelab's code could not be unpacked on this node", completed)

    def close(self) -> None:
        """Close the connection."""
        self._hang_up()
        self.session.close()

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            with contextlib.suppress(OSError, EOFError):
                line.close()

    def _request(self, verb: str, request: Asked) -> bytes:
        body = {"node": self.node.name, "workdir": self.node.workdir, **answers.said(verb, request)}
        if self.node.environment:
            body["node_environment"] = self.node.environment
        return json.dumps(body).encode() + b"\n"

    def _command(self, verb: str) -> str:
        return agent_command(self.node.python, ship.code_dir(self.node.workdir), verb)

    def _run(self, verb: str, request: Asked, body: bytes | BinaryIO, timeout_s: float, into: BinaryIO | None) -> Completed:
        command, head = self._command(verb), self._request(verb, request)
        most = VERBS[verb].most_bytes
        if into is None and verb in question_line.VERBS and (completed := self._ask_line(verb, head, timeout_s)) is not None:
            return completed
        completed = self._run_once(command, head, body, timeout_s, into or _Kept(most, self._endless))
        if completed.returncode == _CODE_MISSING:
            self.unpack(ship.code_dir(self.node.workdir), ship.CODE.archive(), timeout_s=max(timeout_s, 30.0))
            if not isinstance(body, bytes):
                body.seek(0)  # nothing was read by the command that found no code; what was sent to it is sent again
            completed = self._run_once(command, head, body, timeout_s, into or _Kept(most, self._endless))
        return completed

    def _ask_line(self, verb: str, request: bytes, timeout_s: float) -> Completed | None:
        """The answer of the process that answers question after question; None where the question has to be asked by itself: the first one, which
        shows whether this node can answer at all, one beside another, one whose line broke, and one that must not be heard twice, on a line of which
        nothing was heard lately. Raises UnreachableError.
        """
        command = self._command("questions")
        if self._is_crowded:
            return None
        if self._has_answered != command:
            self._has_answered = command
            return None
        is_once = verb in question_line.ONCE
        if not self._asking.acquire(blocking=False):
            return None
        kept = _Kept(VERBS[verb].most_bytes, self._endless)
        kept.write(_MARK + _AGENT_MARK)
        deadline = time.monotonic() + timeout_s
        try:
            if is_once and (self._line is None or time.monotonic() - self._line.answered_s > question_line.MOMENT_S):
                return None
            if self._line is None or self._line.command != command:
                self._hang_up()
                self._line = QuestionLine(self._opened(command, b"", "questions", timeout_s), command)
            completed = self._line.ask(verb, request, cast(BinaryIO, kept), deadline - time.monotonic())
            return Completed(completed.returncode, bytes(kept.bytes), completed.stderr)
        except (OSError, EOFError, ValueError, HomelabError) as error:  # a TimeoutError is an OSError
            self._hang_up()
            is_late = time.monotonic() >= deadline
            if not is_late and not is_once:
                return None
            lost = (
                f"the connection to this node was lost: {f'no answer within {timeout_s:.0f} s' if is_late else f'{verb} was not answered'}"
            )
            raise UnreachableError(lost, where=agent_errors.where_of(self.node), hint=homelab("preflight --only ssh")) from error
        finally:
            self._asking.release()

    def _run_once(self, command: str, head: bytes, body: bytes | BinaryIO, timeout_s: float, into: BinaryIO | _Kept) -> Completed:
        """Into memory where no file is given, but not more than an answer can have: a shell may print without end."""
        try:
            completed = self.session.run(command, stdin=body, head=head, timeout_s=timeout_s, stdout=cast(BinaryIO, into))
        except CrowdedError:
            if self._line is None:
                raise
            self._hang_up()
            self._is_crowded = True
            completed = self.session.run(command, stdin=body, head=head, timeout_s=timeout_s, stdout=cast(BinaryIO, into))
        return Completed(completed.returncode, bytes(into.bytes), completed.stderr) if isinstance(into, _Kept) else completed

    def _endless(self, most_bytes: int) -> HomelabError:
        size = f"{most_bytes >> 20} MiB" if most_bytes >> 20 else f"{most_bytes} bytes"
        return HomelabError(
            f"it sends more than {size} instead of an answer", where=agent_errors.where_of(self.node),
            hint=f"check what its shell prints at start: {on_node(self.node, 'true')}",
        )  # fmt: skip

    def _answer(self, verb: str, completed: Completed) -> dict[str, Any]:
        if completed.returncode == agent_errors.PYTHON_MISSING:
            raise agent_errors.error(self.node, "no Python", completed)
        if _MARK not in completed.stdout and completed.returncode >= 0:
            raise agent_errors.not_begun(self.node, completed)
        # A shell that greets on start has printed before the first mark, a Python that does so before the second.
        output = completed.stdout.partition(_MARK)[2]
        try:
            answer = decoded(output.partition(_AGENT_MARK)[2] if _AGENT_MARK in output else output, VERBS[verb].most_values)
        except ValueError:
            raise agent_errors.error(
                self.node, f"it gave no answer to '{verb}' (exit code {completed.returncode})", completed, output
            ) from None
        self._raise_refusal(answer)
        answer = answers.without_damage(verb, answer)
        fault = answers.fault(verb, answer)
        if fault:
            raise HomelabError(
                f"it answered '{verb}' with something that homelab's agent never sends ({plain_lines(fault)})",
                where=agent_errors.where_of(self.node),
                hint=f"is this your machine? To send the agent again: {agent_errors.on_workdir(self.node, 'rm -r', '/code')}",
            )
        assert isinstance(answer, dict)
        return answer if verb in _AS_IT_IS else answers.with_defaults(verb, cast(dict[str, Any], _harmless(answer)))

    def _raise_refusal(self, answer: Any) -> None:
        refusal = answer.get("error") if isinstance(answer, dict) else None
        if isinstance(refusal, dict) and "kind" in refusal and "message" in refusal:
            raise agent_errors.refusal(self.node, refusal)


def _harmless(value: Any) -> Any:
    """A node's words without what a terminal would obey, or could not show at all (half of a surrogate pair)."""
    if isinstance(value, str) and not (value.isascii() and value.isprintable()):
        text = value.encode("utf-8", "replace").decode()
        return "\n".join(plain(line) for line in text.split("\n"))
    if isinstance(value, dict):
        return {_harmless(key): _harmless(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_harmless(entry) for entry in value]
    return value


class _Kept:
    """Keeps an answer in memory, up to a number of bytes, and the end of what was printed before it."""

    def __init__(self, most: int, refusal: Callable[[int], HomelabError]) -> None:
        self.bytes = bytearray()
        self._most, self._refusal, self._count, self._begins = most, refusal, 0, -1

    def write(self, block: bytes) -> int:
        """As a file's `write`. Raises the refusal."""
        self._count += len(block)
        self.bytes += block
        if self._begins < 0:
            if (place := self.bytes.find(_AGENT_MARK)) >= 0:
                self._begins = place + len(_AGENT_MARK)
            elif len(self.bytes) > 2 * _KEPT_BYTES:
                self.bytes = bytearray((_MARK if _MARK in self.bytes else b"") + self.bytes[-_KEPT_BYTES:])
        if self._begins >= 0 and len(self.bytes) - self._begins > self._most:
            raise self._refusal(self._most)
        if self._begins < 0 and self._count > _MOST_ANSWER_BYTES:
            raise self._refusal(_MOST_ANSWER_BYTES)
        return len(block)


class _AfterMark:
    """Passes on what comes after the agent's mark, up to a number of bytes: raw bytes must not begin with a greeting of the shell or of Python.

    The first of them are `held` until more come, or `pass_on_held`: they may be a refusal.
    """

    def __init__(self, into: BinaryIO, most: int, refusal: Callable[[int], HomelabError]) -> None:
        self._into, self._left, self._most, self._refusal = into, most, most, refusal
        self._before: bytearray | None = bytearray()
        self.held: bytearray | None = bytearray()

    def write(self, block: bytes) -> int:
        """As a file's `write`. Raises the refusal before a byte too many is passed on."""
        if self._before is None:
            self._pass_on(block)
            return len(block)
        self._before += block
        _, mark, rest = bytes(self._before).partition(_AGENT_MARK)
        if mark:
            self._before = None
            self._pass_on(rest)
        elif len(self._before) > _MOST_BYTES:
            raise self._refusal(_MOST_BYTES)
        return len(block)

    def pass_on_held(self) -> None:
        """They are no refusal. Raises as `write` does."""
        block, self.held = bytes(self.held or b""), None
        self._pass_on(block)

    def _pass_on(self, block: bytes) -> None:
        if self.held is not None:
            self.held += block
            if len(self.held) > _MOST_OF_REFUSAL_BYTES:
                self.pass_on_held()
            return
        self._left -= len(block)
        if self._left < 0:
            raise self._refusal(self._most)
        self._into.write(block)
