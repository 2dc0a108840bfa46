"""What a command of `preflight --fix` prints is cleaned, and it still asks for a password: over a real `ssh -t`, in a real terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controller.remote.places import Places, of_this_test

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(shutil.which("sshd") is None and not os.path.exists("/usr/sbin/sshd"), reason="no sshd"),
]
_PROGRAM = """
import sys
from pathlib import Path
from types import SimpleNamespace
from homelab.controller.checks.evidence import Finding
from homelab.cli import preflight
from homelab.controller.base.hint import Command
look = SimpleNamespace(findings=[Finding("a", "end", "fail", "odd", Command(sys.argv[1]), Command(sys.argv[1]))])
preflight._run_fixes(look, Path("cluster.toml"), ask=False)
"""
# As sudo does it: no echo, and a question without an end of line.
_ASKS = "stty -echo; printf 'pass%s: ' word; read word; stty echo; echo; echo it said \"$word\""
_EVIL = r"printf '\033]52;c;cHduZWQ=\007\033[2J\342\200\256\302\233one\ntwo\n'"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    opened = of_this_test(tmp_path, monkeypatch)
    try:
        opened.add("end")
        opened.config.write_text(opened.block("end", "end", f"  UserKnownHostsFile {opened.known_hosts}\n"))
        yield opened
    finally:
        opened.close()


def _until(terminal: int, wanted: bytes) -> bytes:
    said, until_s = b"", time.monotonic() + 60
    while wanted not in said and time.monotonic() < until_s:
        if select.select([terminal], [], [], 0.1)[0]:
            said += os.read(terminal, 1 << 16)
    assert wanted in said, said
    return said


@pytest.mark.parametrize("way", ["ssh -t end {}", "sh -c {}"], ids=["node", "here"])
def test_a_fix_asks_its_question_and_obeys_no_node(places: Places, way: str) -> None:
    controller, terminal = pty.openpty()
    command = way.format(shlex.quote(f"{_EVIL}; {_ASKS}"))
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, command],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        preexec_fn=lambda: os.login_tty(terminal),
    )
    try:
        said = _until(controller, b"password: ")
        os.write(controller, b"open\n")
        said += _until(controller, b"done\r\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(controller)
        os.close(terminal)
    printed = re.sub("\r+\n", "\n", said.decode().partition("'\r\n")[2])  # behind the command itself
    assert "one\ntwo\npassword: \nit said open\n" in printed, said
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(printed), said
