"""The controller runs on Linux, in WSL2 and on macOS: a rule over its syntax trees, and a machine that plays a Mac.

No Mac was at hand: what is tested here is that nothing of Linux is touched, not that everything of macOS works.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.controller.base import own_machine
from homelab.controller.base.errors import UnreachableError
from homelab.controller.config.cluster import Node
from homelab.controller.features.discover import candidates, sources
from homelab.controller.features.setup import relay
from homelab.controller.remote.local import LocalSession
from homelab.controller.run import process_owner
from tests import limits

# What runs on nodes and in the lab is Linux's own.
NOT_CONTROLLER = ("node", "worker", "lab")
# Beside the functions of modules, the keys of sockets and clocks that macOS lacks (their "Availability" in Python's documentation).
LINUX_ONLY = frozenset({
    "sched_getaffinity", "sched_setaffinity", "pidfd_open", "pidfd_send_signal", "memfd_create", "eventfd", "timerfd_create", "epoll", "setns", "unshare", "splice",
    "copy_file_range", "posix_fallocate", "posix_fadvise", "getrandom", "prlimit", "O_TMPFILE", "O_PATH", "AF_NETLINK", "AF_PACKET", "SO_BINDTODEVICE", "SO_PEERCRED",
    "TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_QUICKACK", "CLOCK_BOOTTIME", "waitid", "fdatasync", "getxattr", "setxattr", "prctl", "SIGRTMIN", "SIGPWR", "F_ADD_SEALS",
})  # fmt: skip
KERNEL_FILES = re.compile(r"^/(?:proc|sys|run|dev/shm|etc/os-release)(?:/[^\s]*)?$")
# Programs that Linux and macOS both have, with the words that both know.
PROGRAMS = frozenset({"ssh", "git", "/bin/sh", "bash", "tailscale"})
STARTERS = frozenset(
    {"run", "Popen", "check_output", "check_call", "call", "_output", "execv", "execvp", "execvpe", "execve", "system", "spawnlp"}
)
# Text for a node's shell: its words are the node's.
FOR_NODES = frozenset({"on_node", "as_root", "by_root", "quote_words", "Command", "chain", "Hint", "Problem"})


def breaches(name: str, tree: ast.Module) -> Iterator[str]:
    """Places that only Linux has, in a function (or at the top) that does not ask which system it is on."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def above(node: ast.AST) -> Iterator[ast.AST]:
        while node in parents:
            node = parents[node]
            yield node

    def guarded(node: ast.AST, word: str) -> bool:
        function = next((one for one in above(node) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)), None)
        text = (
            ast.unparse(function)
            if function
            else ast.unparse(next((one for one in above(node) if isinstance(one, ast.If | ast.IfExp)), ast.Pass()))
        )
        return "sys.platform" in text or "is_linux()" in text or ("hasattr(" in text and f"'{word}')" in text)

    def is_for_nodes(node: ast.AST) -> bool:
        calls = [one.func for one in above(node) if isinstance(one, ast.Call)]
        return any((call.id if isinstance(call, ast.Name) else getattr(call, "attr", "")) in FOR_NODES for call in calls)

    def is_prose(node: ast.AST) -> bool:
        return isinstance(parents.get(node), ast.Expr)

    for node in ast.walk(tree):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and node.attr in LINUX_ONLY and not guarded(node, node.attr):
            yield f"{where}: {node.attr} is Linux's own"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if KERNEL_FILES.match(node.value) and not is_prose(node) and not is_for_nodes(node) and not guarded(node, node.value):
                yield f"{where}: {node.value} is there on Linux alone"
            elif (
                node.value.startswith("\0")
                and isinstance(above_it := parents.get(node), ast.Call)
                and getattr(above_it.func, "attr", "") in ("bind", "connect")
            ):
                yield f"{where}: a socket without a file is Linux's own"
        elif isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            program = first_word(node) if called in STARTERS else None
            if program is not None and program not in PROGRAMS and not guarded(node, program):
                yield f"{where}: the program {program!r} is not on every system"


def first_word(call: ast.Call) -> str | None:
    """The program that a call starts, where it is written there."""
    words = call.args[0] if call.args else None
    if isinstance(words, ast.List | ast.Tuple):
        words = words.elts[0] if words.elts else None
    return words.value if isinstance(words, ast.Constant) and isinstance(words.value, str) else None


def of_controller() -> list[str]:
    trees = {path: tree for path, tree in limits.trees().items() if limits.room_of(path) not in NOT_CONTROLLER}
    return [breach for path, tree in trees.items() for breach in breaches(limits.label(path), tree)]


def test_nothing_of_the_controller_is_linux_alone() -> None:
    assert of_controller() == []


@pytest.mark.parametrize(
    "line",
    [
        'os.listdir("/proc")', 'open("/proc/self/stat")', 'Path("/sys/class/net").iterdir()', 'open(f"/proc/{pid}/cmdline")', "os.sched_getaffinity(0)", "os.pidfd_open(1)",
        'os.memfd_create("x")', "select.epoll()", "sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1)", "time.clock_gettime(time.CLOCK_BOOTTIME)",
        'subprocess.run(["ip", "-j", "addr"])', 'subprocess.run(["stat", "-c", "%s", file])', 'subprocess.Popen(["timeout", "5", "x"])', '_output("ip", "neigh")',
        'sock.bind("\\0name")', 'Path("/dev/shm").exists()',
    ],
)  # fmt: skip
def test_the_rule_is_awake(line: str) -> None:
    plain = f"def work():\n    {line}\n"
    assert list(breaches("sample.py", ast.parse(plain))), line
    if "\\0" not in line:
        assert not list(breaches("sample.py", ast.parse(f"def work():\n    if sys.platform == 'linux':\n        {line}\n"))), line


def test_words_for_a_node_are_the_nodes() -> None:
    assert not list(breaches("sample.py", ast.parse('on_node(node, quote_words(["cat", f"/sys/class/net/{name}/speed"]))')))


# A machine that plays a Mac: another name of the system, no /proc, no /sys, no `ip`, and programs that know no GNU options.

MAC = """
import os, sys
import psutil, multiprocessing, subprocess, uuid, ctypes.util, tempfile, socket, zipfile, ssl, asyncio, pathlib  # what they choose by the system was chosen
_own = (os.sep + "psutil" + os.sep, "linecache", "traceback")
def _refuse(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], (str, bytes)):
        path = os.fsdecode(arguments[0])
        if path.startswith(("/proc", "/sys/", "/dev/shm")):
            frame = sys._getframe(1)
            while frame is not None:
                if any(name in frame.f_code.co_filename for name in _own):
                    return
                frame = frame.f_back
            sys.stderr.write("TOUCHED " + path + "\\n")
            raise RuntimeError("a Mac has no " + path)
import sysconfig; sysconfig.get_config_vars()
sys.addaudithook(_refuse)
sys.platform = "darwin"
for name in ("sched_getaffinity", "pidfd_open", "memfd_create", "eventfd", "posix_fallocate"):
    if hasattr(os, name):
        delattr(os, name)
import select, time
for module, name in ((select, "epoll"), (time, "CLOCK_BOOTTIME"), (socket, "TCP_USER_TIMEOUT")):
    if hasattr(module, name):
        delattr(module, name)
"""
BSD = {
    "stat": 'case "$1" in -c|--*) exit 64;; esac',
    "date": 'case "$1" in --*|-d) exit 64;; esac',
    "ps": 'case "$1" in --*) exit 64;; esac',
    "tar": 'for word in "$@"; do case "$word" in --sort*|--owner*|--zstd|--absolute-names) exit 64;; esac; done',
    "sed": 'case "$1" in -i) exit 64;; --*) exit 64;; esac',
    "arp": "echo '? (192.168.7.9) at 0:11:22:33:44:55 on en0 ifscope [ethernet]'",
    "ip": "exit 127", "timeout": "exit 127", "setsid": "exit 127", "getent": "exit 127", "nproc": "exit 127", "free": "exit 127",
}  # fmt: skip


@pytest.fixture
def mac(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that plays one."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(MAC)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, body in BSD.items():
        (programs / name).write_text(f'#!/bin/sh\necho "$0 $*" >> {tmp_path}/called\n{body}\n')
        (programs / name).chmod(0o755)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        '[cluster]\nknown_hosts = "none"\n[[nodes]]\nname = "a"\nhost = "127.0.0.1"\nport = 1\n[[nodes]]\nname = "here"\nhost = "local"\n'
    )
    return {
        **os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{limits.ROOT.parent}", "PATH": f"{programs}:{os.environ['PATH']}", "HOMELAB_CLUSTER": str(cluster),
        "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "HOMELAB_RUNS": str(tmp_path / "runs"),
    }  # fmt: skip


def on_mac(mac: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *words], env=mac, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert "TOUCHED" not in done.stderr and "Traceback" not in done.stderr and "internal error" not in done.stderr, done.stderr
    return done


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["runs"], 0, ""),
        (["preflight"], 3, "this machine runs macOS, and a node needs Linux"),
        (["lab", "up", "x"], 2, "practice nodes need Linux, and this machine runs macOS"),
        (["demo"], 2, "practice nodes need Linux, and this machine runs macOS"),
        (["init", "--this-machine", "--yes"], 3, "a node needs Linux"),
    ],
)  # fmt: skip
def test_commands_on_a_mac(mac: dict[str, str], tmp_path: Path, words: list[str], code: int, said: str) -> None:
    if words[0] == "init":
        mac["HOMELAB_CLUSTER"] = str(tmp_path / "new.toml")
        words = [*words, "127.0.0.1:1"]
    done = on_mac(mac, "-m", "homelab", *words)
    assert done.returncode == code and said in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.timeout(120)
def test_locks_and_owners_on_a_mac(mac: dict[str, str], tmp_path: Path) -> None:
    """A supervisor whose folder somebody deletes is still the only one; who is dead is known, also where there is no boot_id of Linux."""
    program = """
    import json, shutil, subprocess, sys, time
    from pathlib import Path
    from homelab.controller.run import process_owner, supervisor_lock
    from homelab.controller.run.paths import RunPaths
    process_owner._session_uuid = lambda: "the boot"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = process_owner.mark()
    other = {**own, "pid": child.pid, "born": process_owner._born(child.pid)}
    said = [process_owner.lives_here(own), process_owner.is_dead(own), process_owner.lives_here(other)]
    child.communicate(b"\\n")
    said += [process_owner.is_dead(other), 0 < process_owner.age_s() < 60]
    paths = RunPaths(Path(sys.argv[1]))
    paths.root.mkdir()
    with supervisor_lock.held(paths) as ours:
        shutil.rmtree(paths.root)
        said += [ours, supervisor_lock.is_held(paths)]
        paths.root.mkdir()
        with supervisor_lock.held(paths) as second:
            said.append(second)
    print(json.dumps([*said, supervisor_lock.is_held(paths)]))
    """
    done = on_mac(mac, "-c", textwrap.dedent(program), str(tmp_path / "run"))
    assert json.loads(done.stdout) == [True, False, True, True, True, True, True, False, False]


@pytest.fixture
def named_darwin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")


@pytest.mark.usefixtures("named_darwin")
def test_a_mac_is_no_node_and_says_what_it_is() -> None:
    with pytest.raises(UnreachableError) as caught:
        LocalSession(Node(name="here", host="local"))
    assert "macOS" in caught.value.message and 'host = "local"' in caught.value.where and "address of a Linux machine" in caught.value.hint


@pytest.mark.usefixtures("named_darwin")
def test_the_lan_of_a_mac_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        sources, "_output", lambda *words: asked.append(words) or "? (192.168.7.9) at 0:11:22:33:44:55 on en0 ifscope [ethernet]\n"
    )
    monkeypatch.setattr(sources, "from_mdns", lambda note: [])
    monkeypatch.setattr(sources, "from_ssh_config", lambda folder: [])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert [one.host for one in sources.search(lambda text: None, lambda text: None)] == ["192.168.7.9"]
    assert asked == [("arp", "-an")] and not sources.has_nvidia_card()
    assert all(network.endswith(".0/24") for network in sources.own_networks())


def test_words_of_macos() -> None:
    text = "? (192.168.7.9) at 0:1:2:3:4:5 on en0 ifscope [ethernet]\n? (192.168.7.3) at (incomplete) on en0 ifscope [ethernet]\n"
    text += "? (224.0.0.251) at 1:0:5e:0:0:fb on en0 [ethernet]\n"
    assert [
        one.host
        for one in candidates.from_arp(
            text + "? (10.9.0.1) at a:b:c:d:e:f on bridge100 ifscope\n? (192.168.7.255) at ff:ff:ff:ff:ff:ff on en0\n"
        )
    ] == ["192.168.7.9"]
    networks = candidates.networks_around(
        {"lo0": ["127.0.0.1"], "en0": ["192.168.7.4"], "utun3": ["10.8.0.2"], "bridge100": ["192.168.64.1"]}
    )
    assert [str(network) for network in networks] == ["192.168.7.0/24"]
    ports = "\nHardware Port: Ethernet\nDevice: en5\nEthernet Address: a\n\nHardware Port: Wi-Fi\nDevice: en0\nEthernet Address: b\n"
    assert relay._airports(ports) == ["en0"]


@pytest.mark.parametrize(
    ("platform", "words"),
    [("linux", ("ip route get h", "getent hosts h")), ("darwin", ("route -n get h", "dscacheutil -q host -a name h"))],
)
def test_hints_for_this_machine_are_its_own(monkeypatch: pytest.MonkeyPatch, platform: str, words: tuple[str, str]) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert (own_machine.route_to("h"), own_machine.look_up("h")) == words


def test_an_owner_is_no_other_process_that_got_its_number() -> None:
    own = process_owner.mark()
    assert not process_owner.is_dead({**own, "born": own["born"] + 100}), "the time of the boot moves by a second when the clock is set"
    assert process_owner.is_dead({**own, "born": own["born"] + 100 * 3600}) and not process_owner.lives_here(
        {**own, "born": own["born"] + 100 * 3600}
    )
