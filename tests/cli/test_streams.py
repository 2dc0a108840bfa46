"""Standard streams that are closed, full or gone: an exit code that is true, one error, no traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from homelab.controller.run import signals
from scripts.practice.desk import COMMAND, Desk

pytestmark = pytest.mark.timeout(200)


def shell(desk: Desk, redirection: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command as a shell starts it with these redirections."""
    line = f'exec "$@" {redirection}'
    return subprocess.run(
        ["sh", "-c", line, "sh", *COMMAND, *arguments],
        cwd=desk.folder,
        env=desk._environment() | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("arguments", [["explain"], ["explain", "--json"], ["explain", "nosuchtopic", "--json"]], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_the_answer_is_one_error(quiet_desk: Desk, arguments: list[str], unbuffered: str) -> None:
    done = shell(quiet_desk, "> /dev/full", *arguments, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == (2 if "nosuchtopic" in arguments else 1), done.stderr
    assert "Traceback" not in done.stderr and "internal" not in done.stderr
    assert done.stderr.startswith(
        "error: there is no page or topic" if "nosuchtopic" in arguments else "error: the output cannot be written: No space"
    )


@pytest.mark.parametrize(
    ("redirection", "arguments", "code"),
    [
        ("2>&-", ["explain", "nosuch"], 2),
        ("2> /dev/full", ["explain", "nosuch"], 2),
        ("<&- >&- 2>&-", ["explain"], 0),
        (">&-", ["explain", "--json"], 0),
    ],
)
def test_a_stream_that_is_closed_changes_no_exit_code(quiet_desk: Desk, redirection: str, arguments: list[str], code: int) -> None:
    done = shell(quiet_desk, redirection, *arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert not done.stderr


@pytest.fixture
def asking(quiet_desk: Desk) -> Iterator[subprocess.Popen[str]]:
    """A command that has begun to ask a node which takes the connection and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        quiet_desk.write("cluster.toml", f'[[nodes]]\nname = "a"\nhost = "127.0.0.1"\nport = {silent.getsockname()[1]}\n')
        with quiet_desk.spawn("runs") as process:
            connection, _ = silent.accept()
            with connection:
                yield process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_command_that_is_ended_says_so(asking: subprocess.Popen[str], number: signal.Signals) -> None:
    asking.send_signal(number)
    said = asking.communicate(timeout=30)[0]
    assert asking.returncode == 130 and said.endswith("interrupted\n") and "Traceback" not in said, said


def test_what_is_ignored_stays_ignored_and_a_step_is_done_whole() -> None:
    """nohup: the end of the terminal ends nothing."""
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signals.count_alike()
        with signals.held():
            os.kill(os.getpid(), signal.SIGHUP)
        done = False
        with pytest.raises(KeyboardInterrupt), signals.held():
            os.kill(os.getpid(), signal.SIGTERM)
            done = True
        assert done
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_secret_does_not_leave_where_the_encoding_is_ascii(quiet_desk: Desk) -> None:
    """click wraps the bytes of such a stream anew, past whatever hides secrets."""
    program = "import os, typer; from homelab.cli import streams; from homelab.controller.base import secrets; secrets.know(os.environ); "
    program += "streams.prepare(); typer.echo('token hf_planted1234567890 \u00e9')"
    done = subprocess.run(
        [sys.executable, "-c", program], env=quiet_desk._environment() | {"PYTHONIOENCODING": "ascii", "HF_TOKEN": "hf_planted1234567890"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "token *** \\xe9\n"
