"""The agent of one node as a set of questions: ships itself where it is missing, asks, and turns refusals into errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, cast

from homelab.controller.base.errors import BusyError, HomelabError, NoRoomError, StoppedError, SupersededError, TakenError
from homelab.controller.base.hint import Command, Hint, homelab
from homelab.controller.base.node_words import advice
from homelab.controller.base.sanitize import plain, plain_lines
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.facts.node_commands import by_root, on_node, path_word
from homelab.controller.remote import answers, ship
from homelab.controller.remote.bootstrap import AGENT_MARK, ANSWER_MARK, agent_command, unpack_command
from homelab.controller.remote.decoding import decoded
from homelab.controller.remote.session import Completed, Session, Stream
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
_CODE_MISSING, _PYTHON_MISSING = 97, 98
_NOT_WRITABLE = ("Permission denied", "Read-only file system", "Not a directory", "File exists", "No such file or directory: '")
_OF_KINDS = {"taken": TakenError, "stopped": StoppedError, "superseded": SupersededError, "busy": BusyError, "no-room": NoRoomError}
# How a Python ends that finds other files than those that were shipped.
_OF_DAMAGED_CODE = re.compile(
    r"^(?:SyntaxError|IndentationError)\b|^(?:ImportError|ModuleNotFoundError): .*homelab|No module named '?homelab"
)

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

    def ask(self, verb: str, request: Asked = None, *, timeout_s: float = 20.0) -> dict[str, Any]:
        """One question, one answer. Raises UnreachableError (no answer) or HomelabError (refused)."""
        return self._answer(verb, self._run(verb, request, b"", timeout_s, None))

    def send(self, verb: str, request: Asked, body: bytes | BinaryIO, *, timeout_s: float = 600.0) -> dict[str, Any]:
        """A question with a body of bytes (receive-file, receive-checkpoint)."""
        return self._answer(verb, self._run(verb, request, body, timeout_s, None))

    def fetch(self, verb: str, request: Asked, into: BinaryIO, *, most_bytes: int = _MOST_BYTES, timeout_s: float = 600.0) -> None:
        """A question answered with raw bytes (send-checkpoint), written to `into`. Raises HomelabError where more come than may."""
        completed = self._run(verb, request, b"", timeout_s, cast(BinaryIO, _AfterMark(into, most_bytes, self._endless)))
        if completed.returncode != 0:
            raise self._error(f"it could not send its answer ({verb})", completed)

    def open(self, verb: str, request: Asked) -> Stream:
        """A verb that stays until its stdin is closed (listen). The code must be there: ask something first."""
        stream = self.session.open(self._command(verb), stdin=self._request(verb, request))
        try:
            while line := stream.readline(_OPEN_TIMEOUT_S):
                if line.endswith(AGENT_MARK.encode()):
                    return stream
        except (TimeoutError, OSError):
            pass
        stream.close()
        raise HomelabError(f"the agent did not start '{verb}'", where=self._where(), hint=f"by hand: {on_node(self.node, 'true')}")

    def unpack(self, place: str, archive: bytes, *, timeout_s: float = 60.0) -> None:
        """Put an archive of code (`homelab.controller.remote.ship`) into the folder that is named by its content, unless it is there."""
        completed = self.session.run(unpack_command(self.node.python, place), stdin=archive, timeout_s=timeout_s)
        if completed.returncode != 0:
            raise self._error("homelab's code could not be unpacked on this node", completed)

    def close(self) -> None:
        """Close the connection."""
        self.session.close()

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
        completed = self._run_once(command, head, body, timeout_s, into or _Kept(most, self._endless))
        if completed.returncode == _CODE_MISSING:
            self.unpack(ship.code_dir(self.node.workdir), ship.archive()[1], timeout_s=max(timeout_s, 30.0))
            if not isinstance(body, bytes):
                body.seek(0)  # nothing was read by the command that found no code; what was sent to it is sent again
            completed = self._run_once(command, head, body, timeout_s, into or _Kept(most, self._endless))
        return completed

    def _run_once(self, command: str, head: bytes, body: bytes | BinaryIO, timeout_s: float, into: BinaryIO | _Kept) -> Completed:
        """Into memory where no file is given, but not more than an answer can have: a shell may print without end."""
        completed = self.session.run(command, stdin=body, head=head, timeout_s=timeout_s, stdout=cast(BinaryIO, into))
        return Completed(completed.returncode, bytes(into.bytes), completed.stderr) if isinstance(into, _Kept) else completed

    def _endless(self, most_bytes: int) -> HomelabError:
        size = f"{most_bytes >> 20} MiB" if most_bytes >> 20 else f"{most_bytes} bytes"
        return HomelabError(
            f"it sends more than {size} instead of an answer", where=self._where(),
            hint=f"check what its shell prints at start: {on_node(self.node, 'true')}",
        )  # fmt: skip

    def _answer(self, verb: str, completed: Completed) -> dict[str, Any]:
        if completed.returncode == _PYTHON_MISSING:
            raise self._error("no Python", completed)
        if _MARK not in completed.stdout and completed.returncode >= 0:
            raise self._not_begun(completed)
        # A shell that greets on start has printed before the first mark, a Python that does so before the second.
        output = completed.stdout.partition(_MARK)[2]
        try:
            answer = decoded(output.partition(_AGENT_MARK)[2] if _AGENT_MARK in output else output, VERBS[verb].most_values)
        except ValueError:
            raise self._error(f"it gave no answer to '{verb}' (exit code {completed.returncode})", completed, output) from None
        refusal = answer.get("error") if isinstance(answer, dict) else None
        if isinstance(refusal, dict) and "kind" in refusal and "message" in refusal:
            raise self._refusal(refusal)
        answer = answers.without_damage(verb, answer)
        fault = answers.fault(verb, answer)
        if fault:
            raise HomelabError(
                f"it answered '{verb}' with something that homelab's agent never sends ({plain_lines(fault)})",
                where=self._where(),
                hint=f"is this your machine? To send the agent again: {self._on_node('rm -r', '/code')}",
            )
        assert isinstance(answer, dict)
        return answer if verb in _AS_IT_IS else answers.with_defaults(verb, cast(dict[str, Any], _harmless(answer)))

    def _refusal(self, error: dict[str, Any]) -> HomelabError:
        message = plain_lines(str(error["message"]))
        if error["kind"] == "full":
            return self._full(f": {message}")
        if error["kind"] == "internal" and _OF_DAMAGED_CODE.search(message):
            return self._damaged(message)
        hint = Hint("{}; by hand: {}", homelab("preflight --nodes", self.node.name), self._on_node("ls -l"))
        where = plain_lines(str(error.get("where") or ""))
        return _OF_KINDS.get(str(error["kind"]), HomelabError)(
            message, where=f"{self._where()}{', ' if where else ''}{where}", hint=advice(self.node.name, error.get("hint")) or hint
        )

    def _full(self, details: str = "") -> HomelabError:
        return HomelabError(
            f"the disk is full{details}", where=self._where(),
            hint=f"make room: {self._on_node('df -h')}; or edit cluster.toml, node {self.node.name}: workdir = ...",
        )  # fmt: skip

    def _not_begun(self, completed: Completed) -> HomelabError:
        """The login shell itself did something else than the command it was given."""
        output = plain_lines(b"\n".join([completed.stdout[-2000:], completed.stderr[-2000:]]).decode("utf-8", "replace"))
        last = ([line for line in output.splitlines() if line.strip()] or ["it said nothing"])[-1][:300]
        return HomelabError(
            f"its shell ended before it started homelab's agent (exit code {completed.returncode}): {last}", where=self._where(),
            hint=f"this must print two lines: {on_node(self.node, 'echo; echo here')}; if it does not, look at the account's login shell. Look for "
            "an exit or an exec in the files that it reads at start (~/.bashrc, ~/.profile, ~/.config/fish/config.fish, ~/.cshrc)",
        )  # fmt: skip

    def _damaged(self, last: str) -> HomelabError:
        return HomelabError(
            f"homelab's code on this node was changed or is damaged: {last}", where=self._where(),
            hint=f"{on_node(self.node, f'rm -r {path_word(ship.code_dir(self.node.workdir))}')} (homelab then sends it again)",
        )  # fmt: skip

    def _error(self, message: str, completed: Completed, output: bytes = b"") -> HomelabError:
        """`output`: what came on stdout instead of an answer. Its words are shown where stderr has none."""
        text = plain_lines(completed.stderr.decode("utf-8", "replace"))
        words = text or plain_lines(output[-2000:].decode("utf-8", "replace").replace(AGENT_MARK, ""))
        last = ([line for line in words.splitlines() if line.strip()] or ["it said nothing"])[-1][:300]
        if completed.returncode == _PYTHON_MISSING:
            return HomelabError(
                f"there is no Python at {self.node.python}, and no python3 either",
                where=self._where(),
                hint=f"{on_node(self.node, by_root('apt install python3-venv'), 'python3 -m venv ~/.homelab/env')}; then edit cluster.toml: python = ...",
            )
        if "No space left" in text or "Errno 28" in text:
            return self._full()
        if last.endswith("homelab needs 3.9 or newer"):
            return HomelabError(
                last, where=f"{self._where()}, python = {self.node.python}",
                hint=f"install a newer one there, make an environment with it, then edit cluster.toml, node {self.node.name}: python = ...",
            )  # fmt: skip
        if completed.returncode < 0:
            return HomelabError(
                "the agent was killed while it answered (out of memory?)", where=self._where(),
                hint=on_node(self.node, Command("free -h; sudo dmesg | tail", needs_root=True)),
            )  # fmt: skip
        if completed.returncode == 1 and _OF_DAMAGED_CODE.search(last):
            return self._damaged(last)
        if completed.returncode in (126, 127):  # message of a shell that cannot start a program
            return HomelabError(
                f"the Python of this node does not start: {last}", where=f"{self._where()}, python = {self.node.python}",
                hint=f"{on_node(self.node, f'{path_word(self.node.python)} --version')}; or edit cluster.toml: python = ...",
            )  # fmt: skip
        if any(words in last for words in _NOT_WRITABLE):
            return HomelabError(
                f"the workdir cannot be written: {last}",
                where=f"{self._where()}, workdir = {self.node.workdir}",
                hint=f"{self._on_node('ls -ld')}; or edit cluster.toml, node {self.node.name}: workdir = ...",
            )
        by_hand = f"by hand: {on_node(self.node, 'true')}"
        if output and not text:
            python = on_node(self.node, f"{path_word(self.node.python)} -c pass")
            by_hand = f"this must print nothing: {python}; if it prints something, check its sitecustomize and .pth files"
        return HomelabError(f"{message}: {last}", where=self._where(), hint=by_hand)

    def _where(self) -> str:
        return f"node {self.node.name} ({self.node.host})"

    def _on_node(self, command: str, below: str = "") -> str:
        """The text that runs a command on a path of the workdir, for a hint."""
        return on_node(self.node, f"{command} {path_word(self.node.workdir + below)}")


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
    """Passes on what comes after the agent's mark, up to a number of bytes: raw bytes must not begin with a greeting of the shell or of Python."""

    def __init__(self, into: BinaryIO, most: int, refusal: Callable[[int], HomelabError]) -> None:
        self._into, self._left, self._most, self._refusal = into, most, most, refusal
        self._before: bytearray | None = bytearray()

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

    def _pass_on(self, block: bytes) -> None:
        self._left -= len(block)
        if self._left < 0:
            raise self._refusal(self._most)
        self._into.write(block)
