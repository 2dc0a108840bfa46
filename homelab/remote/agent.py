"""The agent of one node as a set of questions: ships itself where it is missing, asks, and turns refusals into errors."""

from __future__ import annotations

import json
from typing import Any, BinaryIO

from homelab.config.cluster import Cluster, Node
from homelab.errors import HomelabError
from homelab.planning.command import agent_command, unpack_command
from homelab.remote import ship
from homelab.remote.session import Completed, Session, Stream

_CODE_MISSING, _PYTHON_MISSING = 97, 98


def connect(cluster: Cluster, node: Node) -> Agent:
    """Open the way to a node. Raises UnreachableError."""
    if node.host == "local":
        from homelab.remote.local import LocalSession

        return Agent(node, LocalSession(node))
    from homelab.remote.ssh import SshSession

    return Agent(node, SshSession(cluster, node))


class Agent:
    """Questions to one node. Every answer is a dict; a refusal raises HomelabError with the node's own words."""

    def __init__(self, node: Node, session: Session) -> None:
        self.node = node
        self.session = session

    def ask(self, verb: str, request: dict[str, Any] | None = None, *, timeout_s: float = 20.0) -> dict[str, Any]:
        """One question, one answer. Raises UnreachableError (no answer) or HomelabError (refused)."""
        done = self._run(verb, request, b"", timeout_s, None)
        return self._answer(verb, done)

    def send(
        self, verb: str, request: dict[str, Any], body: bytes | BinaryIO, *, timeout_s: float = 600.0
    ) -> dict[str, Any]:
        """A question with a body of bytes (receive-file, receive-checkpoint)."""
        return self._answer(verb, self._run(verb, request, body, timeout_s, None))

    def fetch(self, verb: str, request: dict[str, Any], into: BinaryIO, *, timeout_s: float = 600.0) -> None:
        """A question answered with raw bytes (send-checkpoint, send-final), written to `into`."""
        done = self._run(verb, request, b"", timeout_s, into)
        if done.returncode != 0:
            raise self._error(f"it could not send what was asked for ({verb})", done)

    def open(self, verb: str, request: dict[str, Any]) -> Stream:
        """A verb that stays until its stdin is closed (listen). The code must be there: ask something first."""
        return self.session.open(self._command(verb), stdin=self._request(request))

    def close(self) -> None:
        """Close the connection."""
        self.session.close()

    def _request(self, request: dict[str, Any] | None) -> bytes:
        body = {"node": self.node.name, "workdir": self.node.workdir, **(request or {})}
        return json.dumps(body).encode() + b"\n"

    def _command(self, verb: str) -> str:
        return agent_command(self.node.python, ship.code_dir(self.node.workdir), verb)

    def _run(
        self, verb: str, request: dict[str, Any] | None, body: bytes | BinaryIO, timeout_s: float, into: BinaryIO | None
    ) -> Completed:
        command, head = self._command(verb), self._request(request)
        done = self.session.run(command, stdin=body, head=head, timeout_s=timeout_s, stdout=into)
        if done.returncode == _CODE_MISSING:
            self._ship(timeout_s)
            if not isinstance(body, bytes):
                body.seek(0)
            done = self.session.run(command, stdin=body, head=head, timeout_s=timeout_s, stdout=into)
        return done

    def _ship(self, timeout_s: float) -> None:
        command = unpack_command(self.node.python, ship.code_dir(self.node.workdir))
        done = self.session.run(command, stdin=ship.archive()[1], timeout_s=max(timeout_s, 30.0))
        if done.returncode != 0:
            raise self._error("the agent could not be unpacked on this node", done)

    def _answer(self, verb: str, done: Completed) -> dict[str, Any]:
        if done.returncode == _PYTHON_MISSING:
            raise self._error("no Python", done)
        # The answer is the last line: a shell that greets on start may have printed before it.
        lines = done.stdout.strip().splitlines()
        try:
            answer = json.loads(lines[-1])
        except (IndexError, ValueError):
            raise self._error(f"it gave no answer to '{verb}' (exit code {done.returncode})", done) from None
        if (
            isinstance(answer, dict)
            and "error" in answer
            and isinstance(answer["error"], dict)
            and "kind" in answer["error"]
        ):
            raise self._refusal(answer["error"])
        assert isinstance(answer, dict)
        return answer

    def _refusal(self, error: dict[str, Any]) -> HomelabError:
        if error["kind"] == "full":
            return HomelabError(
                f"the disk is full: {error['message']}",
                where=self._where(),
                hint=f"free space below {self.node.workdir}: {self._ssh('df -h')}",
            )
        return HomelabError(
            str(error["message"]), where=self._where(), hint=f"homelab preflight; by hand: {self._ssh('...')}"
        )

    def _error(self, message: str, done: Completed) -> HomelabError:
        text = done.stderr.decode("utf-8", "replace").strip()
        if done.returncode == _PYTHON_MISSING:
            return HomelabError(
                f"there is no Python at {self.node.python}, and no python3 either",
                where=self._where(),
                hint="sudo apt install python3-venv && python3 -m venv ~/.homelab/env  (then edit python = ... in cluster.toml)",
            )
        if "No space left" in text or "Errno 28" in text:
            return HomelabError(
                "the disk is full",
                where=self._where(),
                hint=f"free space below {self.node.workdir}: {self._ssh('df -h')}",
            )
        if "Permission denied" in text or "Read-only file system" in text:
            return HomelabError(
                f"the workdir cannot be written: {text.splitlines()[-1]}",
                where=self._where(),
                hint=f"edit workdir = ... in cluster.toml, or: {self._ssh('ls -ld')}",
            )
        return HomelabError(
            f"{message}: {text.splitlines()[-1] if text else 'it said nothing'}",
            where=self._where(),
            hint=self._ssh("true"),
        )

    def _where(self) -> str:
        return f"node {self.node.name} ({self.node.host})"

    def _ssh(self, command: str) -> str:
        user = f"{self.node.user}@" if self.node.user else ""
        port = f"-p {self.node.port} " if self.node.port != 22 else ""
        return f"ssh {port}{user}{self.node.host} {command}"
