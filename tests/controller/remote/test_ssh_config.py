"""Whatever works as `ssh HOST` works here: keys of ssh_config(5) against real servers, each beside OpenSSH itself."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from homelab.controller.base.errors import UnreachableError
from homelab.controller.config.cluster import Cluster
from homelab.controller.remote import openssh, ssh_login, ssh_route, ssh_settings, ssh_transport
from homelab.controller.remote.ssh import SshSession
from scripts.practice.desk import wait_until
from tests.controller.remote.places import SSH, Places, of_this_test

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(shutil.which("sshd") is None and not os.path.exists("/usr/sbin/sshd"), reason="no sshd"),
]
USER = getpass.getuser()


#: Helpers that other tests of this process keep running (servers that fork workers, programs that are ready to be named).
_OF_OTHER_TESTS: set[psutil.Process] = set()


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    monkeypatch.setattr(sys.modules[__name__], "_OF_OTHER_TESTS", set(psutil.Process().children(recursive=True)))
    opened = of_this_test(tmp_path, monkeypatch)
    monkeypatch.setattr(ssh_transport, "_BY_OPENSSH", set())
    opened.add("end")
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture
def agent_of(places: Places) -> Iterator[object]:
    """`agent_of(name, *keys)`: the socket of an ssh-agent that holds these keys."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *keys: Path) -> Path:
        path = places.folder / name
        started.append(subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL))
        deadline = time.monotonic() + 10
        environment = {**os.environ, "SSH_AUTH_SOCK": str(path)}
        while subprocess.run(["ssh-add", "-l"], env=environment, capture_output=True).returncode == 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for key in keys:
            subprocess.run(["ssh-add", "-q", str(key)], env=environment, check=True, stdin=subprocess.DEVNULL)
        return path

    yield start
    for process in started:
        process.terminate()
        process.wait(10)


def place_of(cluster: Cluster) -> str:
    """What the server at the end of the way says of itself."""
    session = SshSession(cluster, cluster.nodes[0])
    try:
        done = session.run('printf %s "$PLACE"; cat; exit 7', stdin=b" in", timeout_s=20)
        assert done.returncode == 7 and done.stdout.endswith(b" in")
        return done.stdout.decode().removesuffix(" in")
    finally:
        session.close()


def refused(cluster: Cluster) -> UnreachableError:
    with pytest.raises(UnreachableError) as caught:
        SshSession(cluster, cluster.nodes[0]).close()
    assert caught.value.exit_code == 3 and "node end" in caught.value.where and caught.value.hint
    return caught.value


def children() -> list[str]:
    """The command lines of all that this test has started and that still runs."""
    commands = []
    for child in set(psutil.Process().children(recursive=True)) - _OF_OTHER_TESTS:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end just now
            if child.status() != psutil.STATUS_ZOMBIE:
                commands.append(" ".join(child.cmdline()))
    return commands


def without_sshd(commands: list[str]) -> list[str]:
    """Without the servers and agents of the test; one that ends just now has no words any more."""
    return [command for command in commands if command and "sshd" not in command and "ssh-agent" not in command]


# ProxyCommand

NETCAT = """
import os, socket, sys, threading
open(__file__ + ".passed", "w").close()
wire = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def back():
    while block := wire.recv(65536):
        os.write(1, block)
threading.Thread(target=back, daemon=True).start()
while block := os.read(0, 65536):
    wire.sendall(block)
"""


@pytest.mark.parametrize(
    "command",
    [
        "{ssh} -F {config} -W %h:%p through",
        "{python} {netcat} %h %p",
        "sh -c \"test %r = {user} && test %n = behind && {python} {netcat} 127.0.0.1 '%p'\"",  # tokens, and the shell's words
        'sh -c \'exec {python} {netcat} "$1" "$2"\' x %h %p 2>/dev/null',
    ],
)
def test_a_proxy_command_is_obeyed_with_its_tokens_and_its_shell(places: Places, command: str) -> None:
    places.add("through")
    netcat = places.folder / "netcat.py"
    netcat.write_text(NETCAT)
    command = command.format(ssh=SSH, config=places.config, python="python3", netcat=netcat, user=USER)
    trust = f"  UserKnownHostsFile {places.known_hosts}\n"
    alias = f"  HostKeyAlias [127.0.0.1]:{places.ports['end']}\n"
    places.config.write_text(
        places.block("through", "through", trust) + places.block("behind", "end", f"{alias}  ProxyCommand {command}\n")
    )
    assert place_of(places.cluster("behind")) == "end"
    has_passed = "Accepted publickey" in (places.folder / "through" / "log").read_text() or Path(f"{netcat}.passed").exists()
    assert has_passed, "the server is reached without it, too"


def test_a_proxy_that_hangs_is_ended_with_all_that_it_started(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openssh, "LOGIN_LIMIT_S", 2.0)
    monkeypatch.setattr(ssh_route, "HOP_LIMIT_S", 1.0)
    places.config.write_text(places.block("behind", "end", "  ProxyCommand sh -c \"trap '' HUP TERM; sleep 1231; sleep 1232\"\n"))
    started = time.monotonic()
    error = refused(places.cluster("behind"))
    assert "gave no SSH session in time" in error.message and "ssh -v" in error.hint
    assert time.monotonic() - started < 15
    assert not without_sshd(children())
    with pytest.raises(UnreachableError):
        ssh_login.offered_key(places.cluster("behind"), places.cluster("behind").nodes[0])
    wait_until(lambda: not _running("sleep 123"), 5, lambda: str(_running("sleep 123")))  # killed, they may take a moment to be gone


def _running(words: str) -> list[str]:
    names = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [name for name in names if words in name]


def test_a_proxy_that_is_not_there_says_so(places: Places) -> None:
    places.config.write_text(places.block("behind", "end", "  ProxyCommand /nowhere/proxy %h %p\n"))
    assert "/nowhere/proxy" in refused(places.cluster("behind")).message


# ProxyJump


def hops(places: Places) -> None:
    """Three machines on the way, each with its key: by alias, by an IPv6 address with user and port."""
    places.add("first")
    places.add("second", "::1")
    places.add("third")
    second = f"Host ::1\n  IdentityFile {places.key('second')}\n  IdentitiesOnly yes\n"
    places.config.write_text(places.block("one", "first") + second + places.block("three", "third", "  ProxyJump none\n"))


@pytest.mark.parametrize(
    ("jump", "passed"),
    [
        ("one", ["first"]),
        ("{user}@[::1]:{second}", ["second"]),
        ("ssh://one", ["first"]),
        ("one,[::1]:{second}", ["first", "second"]),
        ("one,{user}@[::1]:{second},three", ["first", "second", "third"]),
        ("none", []),
    ],
)
def test_every_hop_of_a_chain_is_passed(places: Places, jump: str, passed: list[str]) -> None:
    hops(places)
    jump = jump.format(user=USER, second=places.ports["second"])
    text = places.config.read_text() + places.block("behind", "end", f"  ProxyJump {jump}\n") + "Host *\n  ProxyJump nowhere.invalid\n"
    places.config.write_text(text.replace(places.block("one", "first"), places.block("one", "first", "  ProxyJump none\n")))
    if passed[:1] == ["second"]:
        places.config.write_text(f"Host ::1\n  ProxyJump none\n{places.config.read_text()}")
    assert place_of(places.cluster("behind")) == "end"
    for name in ("first", "second", "third"):
        was_used = "Accepted publickey" in (places.folder / name / "log").read_text()
        assert was_used == (name in passed), name


def test_the_first_hop_goes_its_own_way(places: Places) -> None:
    """`ssh -J one HOST` asks the configuration of `one` for its ProxyJump in turn."""
    hops(places)
    text = places.config.read_text().replace(places.block("one", "first"), places.block("one", "first", "  ProxyJump three\n"))
    places.config.write_text(text + places.block("behind", "end", "  ProxyJump one\n"))
    assert place_of(places.cluster("behind")) == "end"
    assert all("Accepted publickey" in (places.folder / name / "log").read_text() for name in ("first", "third"))


def test_a_way_that_leads_back_to_itself_ends(places: Places) -> None:
    places.config.write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\nHost behind\n  ProxyJump a\n")
    assert "more than 8 hops" in refused(places.cluster("behind")).message


@pytest.mark.parametrize(("name", "unknown"), [("first", "one"), ("second", "one,[::1]:{second}"), ("end", "one")])
def test_the_host_key_of_every_hop_is_verified(places: Places, name: str, unknown: str) -> None:
    """Whatever the person's own files say of it: StrictHostKeyChecking no lets nobody in."""
    hops(places)
    jump = unknown.format(second=places.ports["second"])
    places.config.write_text(
        places.config.read_text() + places.block("behind", "end", f"  ProxyJump {jump}\n") + "Host *\n  StrictHostKeyChecking no\n"
    )
    lines = places.known_hosts.read_text().splitlines(keepends=True)
    before = [line for line in lines if f":{places.ports[name]} " in line]
    places.known_hosts.write_text("".join(line for line in lines if line not in before))
    error = refused(places.cluster("behind"))
    assert "is not known yet" in error.message and "StrictHostKeyChecking" in error.message
    if name == "end":
        assert error.hint == "homelab trust end"
        node = places.cluster("behind").nodes[0]
        shown = ssh_login.offered_key(places.cluster("behind"), node)
        assert not shown.is_known
        shown.remember(places.cluster("behind"))
        assert ssh_login.offered_key(places.cluster("behind"), node).is_known
        assert place_of(places.cluster("behind")) == "end"
    else:
        assert "a machine on the way" in error.message and "compare the fingerprint" in error.hint
        by_hand = error.hint.partition(": ")[2]
        assert by_hand.startswith("ssh -o UserKnownHostsFile=")
        subprocess.run(
            by_hand.replace("ssh ", "ssh -o StrictHostKeyChecking=accept-new ", 1), shell=True, check=True, capture_output=True, timeout=20
        )
        assert place_of(places.cluster("behind")) == "end"


@pytest.mark.parametrize("name", ["first", "end"])
def test_a_changed_host_key_is_refused_on_the_way_too(places: Places, name: str) -> None:
    hops(places)
    places.config.write_text(places.config.read_text() + places.block("behind", "end", "  ProxyJump one\n"))
    other = (places.folder / "third" / "host_key.pub").read_text().split()[:2]
    lines = [line for line in places.known_hosts.read_text().splitlines() if f":{places.ports[name]} " not in line]
    places.known_hosts.write_text("\n".join([*lines, f"[127.0.0.1]:{places.ports[name]} {' '.join(other)}"]) + "\n")
    error = refused(places.cluster("behind"))
    assert "CHANGED" in error.message and "ssh-keygen" in error.hint and f"[127.0.0.1]:{places.ports[name]}" in error.hint
    subprocess.run(error.hint.partition(": ")[2].partition(" && ")[0], shell=True, check=True, capture_output=True)
    assert "is not known yet" in refused(places.cluster("behind")).message


@pytest.mark.parametrize("broken", ["first", "end"])
def test_who_refuses_the_login_is_said(places: Places, broken: str) -> None:
    hops(places)
    places.config.write_text(places.config.read_text() + places.block("behind", "end", "  ProxyJump one\n"))
    (places.folder / broken / "authorized_keys").write_text("")
    error = refused(places.cluster("behind"))
    assert "the login was refused" in error.message and "Permission denied" in error.message and "ssh -v" in error.hint


# Agents and keys


@pytest.mark.parametrize(
    "form", ["{socket}", '"{socket}"', "~/{relative}", "%d/{relative}", "$THE_AGENT", "${{THE_AGENT}}", "SSH_AUTH_SOCK", None]
)
def test_an_agent_is_asked_wherever_it_listens(places: Places, agent_of, monkeypatch: pytest.MonkeyPatch, form: str | None) -> None:
    key = places.key("end")
    path = agent_of("the agent" if form == '"{socket}"' else "agent", key)
    key.unlink()
    home = Path(os.path.expanduser(f"~{USER}"))
    monkeypatch.setenv("THE_AGENT", str(path))
    other = "SSH_AUTH_SOCK" if form in ("SSH_AUTH_SOCK", None) else "UNUSED"
    monkeypatch.setenv(other, str(path))
    line = f"  IdentityAgent {form.format(socket=path, relative=os.path.relpath(path, home))}\n" if form else ""
    places.config.write_text(f"Host behind\n  Hostname 127.0.0.1\n  Port {places.ports['end']}\n{line}")
    assert place_of(places.cluster("behind")) == "end"


def test_no_agent_is_asked_where_the_configuration_says_none(places: Places, agent_of, monkeypatch: pytest.MonkeyPatch) -> None:
    key = places.key("end")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent_of("agent", key)))
    key.unlink()
    places.config.write_text(f"Host behind\n  Hostname 127.0.0.1\n  Port {places.ports['end']}\n  IdentityAgent none\n")
    assert "the login was refused" in refused(places.cluster("behind")).message


@pytest.mark.parametrize("by", ["IdentitiesOnly yes", "IdentitiesOnly no", "cluster.toml"])
def test_a_key_with_a_passphrase_that_an_agent_holds(places: Places, agent_of, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    key = places.key("end")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent_of("agent", key)))
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(key)], check=True, stdin=subprocess.DEVNULL, capture_output=True)
    if by == "cluster.toml":
        cluster = places.cluster("127.0.0.1", port=places.ports["end"], identity_file=str(key))
    else:
        places.config.write_text(places.block("behind", "end").replace("IdentitiesOnly yes", by))
        cluster = places.cluster("behind")
    assert place_of(cluster) == "end"


def test_of_several_keys_the_right_one_is_found_before_the_server_gives_up(
    places: Places, agent_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [places.folder / f"other{number}" for number in range(8)]
    for other in others:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent_of("agent", *others)))
    files = "".join(f"  IdentityFile {other}\n" for other in others[:2])
    places.config.write_text(places.block("behind", "end", files))
    assert place_of(places.cluster("behind")) == "end"


@pytest.mark.parametrize("form", ["%d/{relative}", "${{KEYS}}/end/id", "{folder}/%n/id"])
def test_the_name_of_a_key_may_have_tokens(places: Places, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setenv("KEYS", str(places.folder))
    relative = os.path.relpath(places.key("end"), os.path.expanduser(f"~{USER}"))
    name = form.format(relative=relative, folder=places.folder)
    places.config.write_text(f"Host end\n  Hostname 127.0.0.1\n  Port {places.ports['end']}\n  IdentityFile {name}\n")
    assert place_of(places.cluster("end")) == "end"


@pytest.mark.parametrize("place", ["CertificateFile", "beside the key"])
def test_a_certificate_of_the_person_opens(places: Places, place: str) -> None:
    authority = places.folder / "authority"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(authority)], check=True)
    port = places.add("signed", more=f"TrustedUserCAKeys {authority}.pub\n")
    (places.folder / "signed" / "authorized_keys").write_text("")
    key = places.key("signed")
    subprocess.run(["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", USER, f"{key}.pub"], check=True)
    line = ""
    if place == "CertificateFile":
        shutil.move(f"{key}-cert.pub", places.folder / "cert.pub")
        line = f"  CertificateFile {places.folder / 'cert.pub'}\n"
    places.config.write_text(places.block("behind", "signed", line))
    assert port and place_of(places.cluster("behind")) == "signed"


# Host keys


def test_an_alias_of_the_host_key(places: Places) -> None:
    places.config.write_text(places.block("behind", "end", "  HostKeyAlias the-end\n"))
    assert refused(places.cluster("behind")).hint == "homelab trust end"
    key = ssh_login.offered_key(places.cluster("behind"), places.cluster("behind").nodes[0])
    key.remember(places.cluster("behind"))
    assert places.known_hosts.read_text().splitlines()[-1].startswith("the-end ssh-ed25519 ")
    assert place_of(places.cluster("behind")) == "end"


@pytest.mark.parametrize("kind", ["certificate", "pattern", "two keys"])
def test_known_hosts_is_read_as_openssh_reads_it(places: Places, kind: str) -> None:
    line = places.known_hosts.read_text()
    other = sshd_key(places)
    if kind == "certificate":
        authority = places.folder / "authority"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(authority)], check=True)
        host_key = places.folder / "end" / "host_key"
        subprocess.run(["ssh-keygen", "-q", "-s", str(authority), "-h", "-I", "end", "-n", "127.0.0.1,end", f"{host_key}.pub"], check=True)
        places.add("signed", more=f"HostKey {host_key}\nHostCertificate {host_key}-cert.pub\n")
        config = places.folder / "signed" / "sshd_config"
        config.write_text(config.read_text().replace(f'HostKey "{places.folder}/signed/host_key"\n', ""))
        restart(places, "signed")
        public = Path(f"{authority}.pub").read_text()
        places.known_hosts.write_text(f"@cert-authority [127.0.0.1]:*,127.0.0.1,end {public}")
        places.config.write_text(places.block("behind", "signed"))
        assert place_of(places.cluster("behind")) == "signed"
        return
    port = places.ports["end"]
    places.known_hosts.write_text(line.replace("127.0.0.1", "127.0.0.*") if kind == "pattern" else f"{line}[127.0.0.1]:{port} {other}\n")
    places.config.write_text(places.block("behind", "end"))
    assert place_of(places.cluster("behind")) == "end"


def sshd_key(places: Places) -> str:
    other = places.folder / "another"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    return " ".join(Path(f"{other}.pub").read_text().split()[:2])


def restart(places: Places, name: str) -> None:
    from homelab.lab import sshd

    places.processes[name].terminate()
    places.processes[name].wait(10)
    with (places.folder / name / "log").open("ab") as log:
        places.processes[name] = subprocess.Popen(sshd.command(places.folder / name), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    sshd.wait_for_banner("127.0.0.1", places.ports[name], places.folder / name / "log", name)


def test_the_persons_own_known_hosts_file(places: Places) -> None:
    """Where cluster.toml names none."""
    cluster = places.cluster("behind").model_copy(update={"known_hosts": None})
    cluster.model_post_init(None)
    own = places.folder / "own hosts"
    places.config.write_text(places.block("behind", "end", f'  UserKnownHostsFile "{own}"\n'))
    assert "is not known yet" in refused(cluster).message
    key = ssh_login.offered_key(cluster, cluster.nodes[0])
    assert key.remember(cluster) == own
    assert place_of(cluster) == "end"
    name, _, _ = own.read_text().partition(" ")
    other = places.folder / "other key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    own.write_text(f"{name} {other.with_suffix('.pub').read_text()}")
    error = refused(cluster)
    assert "CHANGED" in error.message and f"ssh-keygen -f '{own}' -R" in error.hint
    subprocess.run(error.hint.partition(": ")[2].partition(" && ")[0], shell=True, check=True, capture_output=True)
    assert "is not known yet" in refused(cluster).message


# Which lines of the files hold


def test_include_and_match_decide(places: Places) -> None:
    inner = places.folder / "inner.conf"
    inner.write_text(
        f'Match host the-end exec "test -e {places.config}"\n  Hostname 127.0.0.1\n  Port {places.ports["end"]}\n  IdentityFile {places.key("end")}\n'
    )
    places.config.write_text(f"Match originalhost alias\n  Hostname the-end\n  User {USER}\nMatch all\nInclude {inner}\nHost *\n  Port 1\n")
    places.config.write_text(f"Host alias\n  User {USER}\n  HostName 127.0.0.1\nInclude {inner}\n" + places.config.read_text())
    inner.write_text(inner.read_text().replace("Match host the-end", "Match originalhost alias"))
    assert place_of(places.cluster("alias")) == "end"


@pytest.mark.parametrize("line", ["UseKeychain yes", "NoSuchKey x", "Port abc", "Port", "ProxyJump a@[::1]:99999", 'User "x'])
def test_a_configuration_that_openssh_refuses_is_said_with_its_place(places: Places, line: str) -> None:
    places.config.write_text(f"{places.block('behind', 'end')}  {line}\n")
    error = refused(places.cluster("behind"))
    assert "terminating, 1 bad configuration options" in error.message
    assert f"{places.config}, line 6" in error.where
    if "Key" in line:
        assert "IgnoreUnknown" in error.hint
        added = error.hint.partition(": ")[2].partition(" (")[0]
        places.config.write_text(f"{added}\n{places.config.read_text()}")
    else:
        assert "line 6" in error.hint
        places.config.write_text(places.block("behind", "end"))
    assert place_of(places.cluster("behind")) == "end"


def test_a_question_to_openssh_that_does_not_end(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_settings, "LIMIT_S", 0.5)
    places.config.write_text('Match exec "sleep 1241; true"\n  Port 1\n')
    assert "did not read its configuration" in refused(places.cluster("behind")).message
    assert not [name for name in children() if "sleep 1241" in name]


def test_without_openssh_the_words_of_cluster_toml_do(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(places.folder / "nothing"))
    cluster = places.cluster("127.0.0.1", port=places.ports["end"], identity_file=str(places.key("end")), user=USER)
    assert place_of(cluster) == "end"
    with pytest.raises(UnreachableError, match="no `ssh` is installed here"):
        SshSession(places.cluster("some-alias.invalid"), places.cluster("some-alias.invalid").nodes[0])


# What a session promises, over OpenSSH as over paramiko


@pytest.fixture
def session(places: Places) -> Iterator[SshSession]:
    """Over OpenSSH, with keys beside it that would spoil a command."""
    places.config.write_text(
        places.block("behind", "end", "  Compression yes\n  RemoteCommand echo no\n  RequestTTY force\n  LocalForward 1 localhost:1\n")
    )
    cluster = places.cluster("behind")
    opened = SshSession(cluster, cluster.nodes[0])
    assert isinstance(opened._connection, openssh.OpenSshTransport)
    yield opened
    opened.close()
    opened.close()
    wait_until(lambda: not without_sshd(children()), 5.0, lambda: str(children()))  # `cat` ends a moment after its connection


def test_bytes_exit_codes_and_limits(session: SshSession) -> None:
    megabytes = os.urandom(1 << 20) * 8
    done = session.run("sha256sum; echo err >&2; exit 3", head=b"first\n", stdin=megabytes, timeout_s=30)
    assert (done.returncode, done.stderr) == (3, b"err\n")
    assert done.stdout.split()[0].decode() == hashlib.sha256(b"first\n" + megabytes).hexdigest()
    assert session.run("kill -9 $$", timeout_s=10).returncode == -1
    assert session.run("exit 5", stdin=megabytes, timeout_s=10).returncode == 5
    with pytest.raises(UnreachableError, match="no answer within 1 s"):
        session.run("sleep 5", timeout_s=1)
    assert session.run("echo on", timeout_s=10).stdout == b"on\n", "the connection is still good"


def test_a_stream_and_a_round_trip(session: SshSession) -> None:
    stream = session.open("echo one; cat", stdin=b"two\n")
    assert stream.readline(10) == b"one" and stream.readline(10) == b"two"
    with pytest.raises(TimeoutError):
        stream.readline(0.1)
    stream.write(b"three\n")
    assert stream.readline(10) == b"three"
    stream.close()
    stream.close()
    assert 0.0 <= session.round_trip_ms() < 5000


def test_a_connection_that_breaks_is_one_clear_error(session: SshSession, places: Places) -> None:
    server = psutil.Process(places.processes["end"].pid)
    connections = server.children(recursive=True)
    assert connections
    for process in connections:
        process.kill()
    with pytest.raises(UnreachableError, match="lost"):
        session.run("sleep 3", timeout_s=20)
    with pytest.raises(UnreachableError):
        session.round_trip_ms()


def test_a_controller_that_is_killed_leaves_no_connection(places: Places) -> None:
    """The connection ends with the pipe that this process holds."""
    places.config.write_text(places.block("behind", "end", "  Compression yes\n"))
    program = (
        "import sys, time; from homelab.controller.config.cluster import Cluster, Node; from homelab.controller.remote.ssh import SshSession;"
        f"c = Cluster(nodes=(Node(name='end', host='behind'),), known_hosts={str(places.known_hosts)!r});"
        "s = SshSession(c, c.nodes[0]); print(s._connection._process.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    master = psutil.Process(int(process.stdout.readline()))
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    master.wait(20)


def test_paramiko_serves_who_needs_no_more(places: Places) -> None:
    places.config.write_text(places.block("behind", "end"))
    cluster = places.cluster("behind")
    session = SshSession(cluster, cluster.nodes[0])
    try:
        assert isinstance(session._connection, ssh_transport.ParamikoTransport)
    finally:
        session.close()


def test_a_name_for_two_addresses_is_no_proxy(places: Places) -> None:
    """AddressFamily and BindAddress."""
    places.config.write_text(places.block("behind", "end", "  AddressFamily inet\n  BindAddress 127.0.0.1\n"))
    assert place_of(places.cluster("behind")) == "end"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        places.config.write_text(
            places.block("behind", "end", "  AddressFamily inet\n").replace(str(places.ports["end"]), str(unused.getsockname()[1]))
        )
        assert "nothing answers on port" in refused(places.cluster("behind")).message
