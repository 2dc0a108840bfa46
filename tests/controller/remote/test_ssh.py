"""SSH sessions against real sshd: streams, exit codes, time limits, broken connections, and what each refusal says."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import paramiko
import pytest

from homelab.controller.base.errors import UnreachableError
from homelab.controller.config.cluster import Cluster
from homelab.controller.remote import session as session_module
from homelab.controller.remote import ssh
from homelab.controller.remote.fanout import Fleet
from homelab.controller.remote.local import LocalSession
from homelab.controller.remote.ssh import SshSession
from homelab.lab import Lab, procfs

pytestmark = pytest.mark.timeout(60)
MEGABYTES_20 = os.urandom(1 << 20) * 20


@pytest.fixture
def session(cluster: Cluster) -> Iterator[SshSession]:
    opened = SshSession(cluster, cluster.node("node1"))
    yield opened
    opened.close()


def refused(cluster: Cluster, **changes: object) -> UnreachableError:
    """The error of connecting to node1 with other settings: always three parts, always exit code 3."""
    node = cluster.node("node1").model_copy(update=changes)
    with pytest.raises(UnreachableError) as caught:
        SshSession(cluster, node).close()
    assert caught.value.exit_code == 3 and "node node1" in caught.value.where and caught.value.hint
    return caught.value


def test_exit_code_and_streams(session: SshSession) -> None:
    done = session.run("echo out; echo err >&2; exit 7", timeout_s=10)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    assert session.run("kill -9 $$", timeout_s=10).returncode != 0


def test_head_and_body_arrive_in_order_and_whole(session: SshSession) -> None:
    done = session.run("sha256sum", head=b"first line\n", stdin=MEGABYTES_20, timeout_s=30)
    assert done.stdout.split()[0].decode() == hashlib.sha256(b"first line\n" + MEGABYTES_20).hexdigest()


def test_twenty_megabytes_come_back_as_they_were_sent(session: SshSession) -> None:
    into = io.BytesIO()
    done = session.run("tee /dev/stderr | cat", stdin=io.BytesIO(MEGABYTES_20), stdout=into, timeout_s=30)
    assert done.returncode == 0 and done.stdout == b""
    assert into.getvalue() == MEGABYTES_20
    # Both streams full at once is no deadlock. Of stderr the end is kept: what a command says last is why it ended.
    assert MEGABYTES_20.endswith(done.stderr) and len(done.stderr) >= 1 << 20


def test_a_command_may_leave_its_input_unread(session: SshSession, tmp_path: Path) -> None:
    file = tmp_path / "body"
    file.write_bytes(MEGABYTES_20)
    with file.open("rb") as stream:
        assert session.run("exit 5", stdin=stream, timeout_s=10).returncode == 5
        position = stream.tell()
        assert session.run("echo on", timeout_s=10).stdout == b"on\n"
        assert stream.tell() == position < len(MEGABYTES_20), "nobody reads on in the background"


def test_nobody_reads_a_body_any_more_when_the_command_is_over(session: SshSession) -> None:
    class Slow(io.BytesIO):
        reading = False

        def read(self, size: int | None = -1) -> bytes:
            self.reading = True
            time.sleep(0.3)
            self.reading = False
            return b"x" * 65536

    body = Slow()
    assert session.run("exit 5", stdin=body, timeout_s=10).returncode == 5
    assert not body.reading, "the caller may close it now, or send it again"


def test_a_time_limit_is_one_clear_error(session: SshSession) -> None:
    started = time.monotonic()
    with pytest.raises(UnreachableError, match="no answer within 1 s") as caught:
        session.run("sleep 5", timeout_s=1)
    assert time.monotonic() - started < 4
    assert "node node1" in caught.value.where and caught.value.hint
    assert session.run("echo on", timeout_s=10).stdout == b"on\n", "the connection is still good"


def test_an_open_command_is_read_line_by_line(session: SshSession) -> None:
    stream = session.open("echo one; cat", stdin=b"two\n")
    assert stream.readline(5) == b"one" and stream.readline(5) == b"two"
    with pytest.raises(TimeoutError):
        stream.readline(0.2)
    stream.close()
    stream.close()


@pytest.mark.parametrize("error", [EOFError(), paramiko.SSHException("Key-exchange timed out waiting for key negotiation")])
def test_an_open_command_whose_connection_ends_says_so_in_one_way(error: Exception) -> None:
    """Who follows a run for weeks tries again after it, and after nothing else."""

    def raises(*_: object) -> None:
        raise error

    stream = ssh._ChannelStream(SimpleNamespace(recv=raises, sendall=raises, settimeout=lambda _: None, shutdown_write=raises))
    for act in (lambda: stream.readline(1.0), lambda: stream.write(b"\n")):
        with pytest.raises(OSError, match=str(error) or "EOFError"):
            act()
    stream.close()


@pytest.mark.parametrize("kind", ["over SSH", "this machine"])
def test_an_open_command_may_end_without_reading_its_input(session: SshSession, cluster: Cluster, kind: str) -> None:
    opened = session if kind == "over SSH" else LocalSession(cluster.node("node1"))
    stream = opened.open("echo one; exit 3", stdin=b"x" * (32 << 20))
    assert [stream.readline(10), stream.readline(10)] == [b"one", b""]
    stream.close()


def test_a_broken_connection_is_said_and_the_next_question_connects_anew(cluster: Cluster, remote_lab: Lab) -> None:
    with Fleet(cluster.only(("node1",))) as fleet:
        assert fleet.ask("runs")[1] == {}
        servers = [pid for pid in remote_lab.processes_of("node1") if "@notty" in " ".join(procfs.command_line(pid))]
        assert servers
        procfs.send(servers, signal.SIGKILL)
        _, errors = fleet.ask("runs")
        if errors:  # the reader thread may have seen the end before: then it has connected anew already
            assert errors["node1"].exit_code == 3 and "lost" in errors["node1"].message
        answers, errors = fleet.ask("runs")
        assert not errors and not answers["node1"]["runs"]


def test_nothing_listens(cluster: Cluster) -> None:
    error = refused(cluster, port=1)
    assert "nothing answers on port 1" in error.message and "ssh" in error.hint


def test_something_else_listens(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        error = refused(cluster, host="127.0.0.1", port=server.getsockname()[1])
        thread.join()
    assert "no SSH session" in error.message or "nothing answers" in error.message


def test_a_name_that_nobody_knows(cluster: Cluster) -> None:
    error = refused(cluster, host="no-such-host.invalid")
    assert 'there is no machine with the name "no-such-host.invalid"' in error.message and "cluster.toml" in error.hint


def test_a_key_that_the_node_does_not_know(cluster: Cluster, tmp_path: Path) -> None:
    key = tmp_path / "it's a key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, stdin=subprocess.DEVNULL)
    error = refused(cluster, identity_file=str(key))
    assert "the login was refused" in error.message
    assert error.hint.startswith("ssh-copy-id -i '"), "the hint names this key, quoted"


def test_an_identity_file_that_is_not_there(cluster: Cluster, tmp_path: Path) -> None:
    error = refused(cluster, identity_file=str(tmp_path / "nowhere $(x)"))
    assert "does not exist" in error.message and "identity_file" in error.where
    assert f"'{tmp_path}/nowhere $(x)'" in error.hint


@pytest.mark.parametrize(
    "content", [b"", b"garbage\n", b"\xff\xfe\x00" * 50, b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n"]
)
def test_an_identity_file_that_is_no_key(cluster: Cluster, tmp_path: Path, content: bytes) -> None:
    key = tmp_path / "id"
    key.write_bytes(content)
    error = refused(cluster, identity_file=str(key))
    assert "the identity file cannot be used" in error.message, error
    assert str(key) in error.where and "ssh-keygen -l -f" in error.hint


def test_a_public_key_in_place_of_the_private_one(cluster: Cluster) -> None:
    error = refused(cluster, identity_file=f"{cluster.node('node1').identity_file}.pub")
    assert "the identity file cannot be used" in error.message, error


def test_a_key_with_a_passphrase(cluster: Cluster, tmp_path: Path) -> None:
    key = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(key)], check=True, stdin=subprocess.DEVNULL)
    error = refused(cluster, identity_file=str(key))
    assert "passphrase" in error.message and "ssh-add" in error.hint


def test_the_library_below_prints_nothing_of_its_own() -> None:
    """paramiko's threads log tracebacks of failed connections, now and then before the process ends."""
    program = "import homelab.controller.remote.ssh, logging; logging.getLogger('paramiko.transport').error('Traceback')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


def test_a_server_that_stands_still_is_given_up(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel acknowledges all bytes, so only a sign of life that does not come tells. paramiko would wait for ever."""
    monkeypatch.setattr(ssh, "_SILENT_S", 0.2)
    monkeypatch.setattr(ssh, "_SIGN_OF_LIFE_S", 0.5)
    session = SshSession(cluster, cluster.nodes[0])
    try:
        started = time.monotonic()
        with pytest.raises(UnreachableError, match="stopped answering"):
            session.run("kill -STOP $PPID; sleep 6; kill -KILL $PPID", timeout_s=60)
        with pytest.raises(UnreachableError):
            session.round_trip_ms()
        assert time.monotonic() - started < 10
    finally:
        session.close()


def test_a_silent_command_is_not_taken_for_a_dead_node(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "_SILENT_S", 0.1)
    session = SshSession(cluster, cluster.nodes[0])
    try:
        assert session.run("sleep 1; echo there", timeout_s=20).stdout == b"there\n"
    finally:
        session.close()


def test_a_line_without_end_is_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MOST_LINE_BYTES", 1 << 18)
    session = SshSession(cluster, cluster.nodes[0])
    try:
        stream = session.open("exec cat /dev/zero")
        with pytest.raises(OSError, match="instead of a line"):
            stream.readline(20)
        stream.close()
    finally:
        session.close()


def test_a_node_that_is_given_up_is_not_waited_for(cluster: Cluster) -> None:
    """Somebody waits for its answer; from another thread it is given up. Then it is not even connected again."""
    failed: list[Exception] = []
    with Fleet(cluster) as fleet:

        def wait() -> None:
            try:
                fleet.agent("node1").session.run("exec sleep 50", timeout_s=50)
            except UnreachableError as error:
                failed.append(error)

        session = fleet.agent("node1").session
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        started = time.monotonic()
        while session.run("pgrep -f 'sleep 5[0]'", timeout_s=10).returncode != 0:
            assert time.monotonic() - started < 20
        fleet.give_up("node1", "nothing has been heard of it")
        waiting.join(10)
        assert failed and not waiting.is_alive()
        with pytest.raises(UnreachableError, match="nothing has been heard of it"):
            fleet.agent("node1")
        assert fleet.ask("free-port", names=["node1"])[1]["node1"].exit_code == 3
        assert "node2" in fleet.ask("free-port", names=["node2"])[0]
